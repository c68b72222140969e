"""An internet of network namespaces: true IP packets over lines as homes have them, and home routers.

`make internet` plays its scenes. It needs root and `/dev/net/tun`, and no module of the kernel beside that.
"""
