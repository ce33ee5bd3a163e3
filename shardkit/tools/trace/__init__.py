"""What a trace tells: where steps lose time, which rank is late, and what to change."""
