"""Write run.toml and the key that signs it, once, on the machine that founds the run."""

from model import Adder

import p2p_diloco

p2p_diloco.new_run("run.toml", Adder(), rounds={"round_seconds": 2.0, "fragments": 2, "spans_per_fragment": 4})
