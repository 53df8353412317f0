"""What a lane moves: payloads, their announcements, and the handles of transfers."""
