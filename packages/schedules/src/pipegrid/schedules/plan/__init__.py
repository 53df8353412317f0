"""What every position of a pipeline does, as plain data: actions, plans, and their written forms."""
