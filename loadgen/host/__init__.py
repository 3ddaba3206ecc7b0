"""What the machine does to a measurement: scheduling, idle states, CPU steal and slow-downs."""
