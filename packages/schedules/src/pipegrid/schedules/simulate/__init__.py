"""What a plan costs: start and end of every action, bubbles, memory over time."""
