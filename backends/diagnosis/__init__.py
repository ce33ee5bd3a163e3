"""Which rank of a job does not come to a collective, where it stands, and how a wait in vain ends."""
