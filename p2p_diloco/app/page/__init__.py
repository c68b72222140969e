"""The page: a web page beside one or several peers, which reads their files and writes only `control.json`."""
