"""What the runtime keeps of a stage: its computes, the payloads on its edges, what waits for a backward."""
