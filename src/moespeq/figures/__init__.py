"""Pictures of what was recorded and measured. matplotlib is asked for only when one is drawn."""
