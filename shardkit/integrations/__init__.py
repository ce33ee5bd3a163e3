"""Doors for frameworks that train: one module each, which imports the framework; nothing here is imported unless used.

========================================  =======================================================
``shardkit.integrations.huggingface``     accelerate's Accelerator, transformers' Trainer
``shardkit.integrations.lightning``       Lightning's Trainer
``shardkit.integrations.fabric``          Lightning's Fabric
========================================  =======================================================
"""
