"""The console's core without a screen: which nodes, how to reach them, what they said last."""
