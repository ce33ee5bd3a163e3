"""The snippets of the documents that shardkit set out from, run as they stand."""
