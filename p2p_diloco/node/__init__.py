"""The shell around the protocol: performs the engine's actions over real streams and passes it what arrives."""
