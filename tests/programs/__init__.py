"""Training programs as data: drawn by hypothesis, run by several interpreters, compared step by step."""
