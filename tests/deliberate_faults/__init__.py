"""Deliberate faults: each is put into a copy of the source, and the tests named with it have to fail.

A test that can't fail shows nothing. ``python -m tests.deliberate_faults`` (``make faults``) plants one fault after the
other and prints which tests turned red; ``test_deliberate_faults.py`` holds the table to the source as it is.
"""
