"""Messages of lanes: payloads, their announcements, and the handles of transfers."""
