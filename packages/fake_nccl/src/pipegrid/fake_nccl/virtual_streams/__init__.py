"""Virtual streams: vector clocks over streams, memory and host waits; and a device that runs late."""
