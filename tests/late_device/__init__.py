"""A device with streams that complete late, registered with torch as vendors register theirs."""
