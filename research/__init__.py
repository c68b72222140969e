"""Questions of learning: many islands in one process, the real outer maths, and what others do beside it."""
