"""Jobs: ranks started by torch's elastic agent, their logs, how they fail, go on and stop."""
