"""The shell around the rules: plays their actions over real streams and tells them what came."""
