"""What the engine says about itself: statistics, metrics, logging. A leaf: imported by anyone, imports the wire's messages only."""
