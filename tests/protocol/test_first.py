import pytest
from swarm_driver import Swarm, MINUTE

@pytest.mark.parametrize("n",[1,2,3,4,8])
@pytest.mark.parametrize("who",["all","one","none"])
@pytest.mark.parametrize("founder",["bootstrap","training"])
def test_founded(n,who,founder):
    s=Swarm(seed=n)
    names=[f"p{i}" for i in range(n)]
    if founder=="bootstrap":
        s.add("boot",trains=False,found=True)
    for i,nm in enumerate(names):
        s.add(nm,dialable=who=="all" or (who=="one" and i==0), found=founder=="training" and i==0)
        s.run(7.0)
    if founder=="training" and who=="none" and n>1:
        return
    s.run_until(lambda: s.all_members() and s.agreed() , 5*MINUTE)
    t=s.now
    h=s.height("p0")
    s.run(3*MINUTE)
    s.run_to_cycle_end(); s.run(-1e-3+4.0)
    print(s.describe(), s.num_messages)
    assert s.height("p0")>h+15
    assert s.included_once()

def founded(n, who="all", boot=True, seed=0, **kw):
    s=Swarm(seed=seed, **kw)
    if boot: s.add("boot",trains=False,found=True)
    for i in range(n):
        s.add(f"p{i}",dialable=who=="all" or (who=="one" and i==0), found=not boot and i==0)
    s.run_until(lambda: s.all_members() and s.agreed() , 5*MINUTE)
    return s

def grows(s, name, by=10, within=2*MINUTE):
    h=s.height(name)
    return s.run_until(lambda: s.height(name)>=h+by, within)

CASES=[(n,w) for n in (1,2,3,4,8) for w in ("all","one","none")]
@pytest.mark.parametrize(("n","who"),CASES)
def test_goodbye(n,who):
    if n<2: return
    s=founded(n,who)
    leaver="p1" if n>1 else "p0"
    s.leave(leaver); s.run(5); s.kill(leaver)
    s.run_until(s.all_members, 1*MINUTE)
    grows(s,"p0")
    s.start(leaver)
    s.run_until(lambda: s.all_members() and s.agreed(), 3*MINUTE)
    grows(s,"p0")

@pytest.mark.parametrize(("n","who"),CASES)
def test_death(n,who):
    if n<2: return
    s=founded(n,who)
    s.kill("p1")
    s.run_until(s.all_members, 9*MINUTE if n==2 else MINUTE)
    grows(s,"p0")
    s.start("p1")
    s.run_until(lambda: s.all_members() and s.agreed(), 3*MINUTE)
    grows(s,"p0")

@pytest.mark.parametrize(("n","who"),CASES)
def test_weekend_paused(n,who):
    s=founded(n,who)
    s.run(2*MINUTE)
    for m in s.machines: s.pause(m)
    s.break_links()
    s.run(60*3600.0)
    names=list(s.machines); s.random.shuffle(names)
    for m in names:
        s.resume(m); s.run(s.random.uniform(0,20))
    s.run_until(lambda: s.all_members() and s.agreed(), 3*MINUTE)
    grows(s,"p0")
    assert all(m.roster.epoch==0 for m in s.running())

@pytest.mark.parametrize(("n","who"),CASES)
@pytest.mark.parametrize("polite",[False,True])
def test_weekend_killed(n,who,polite):
    s=founded(n,who)
    s.run(2*MINUTE)
    trains=[m for m in s.machines if m!="boot"]
    if polite:
        for m in trains:
            s.leave(m); s.run(1.0); 
        s.run(5)
    for m in list(s.machines): s.kill(m)
    s.run(60*3600.0)
    names=list(s.machines); s.random.shuffle(names)
    for m in names:
        s.start(m); s.run(s.random.uniform(0,20))
    s.run_until(lambda: s.all_members() and s.agreed(), 12*MINUTE if polite else 5*MINUTE)
    grows(s,"p0")

@pytest.mark.parametrize(("n","who"),CASES)
def test_bootstrap_killed_after_roster_1(n,who):
    s=Swarm(seed=3); s.add("boot",trains=False,found=True)
    for i in range(n):
        s.add(f"p{i}",dialable=who=="all" or (who=="one" and i==0))
    s.run_until(lambda: any(m.engine.book.in_force and m.roster.k==1 for m in s.running(trains=False)),MINUTE, step=0.05)
    s.kill("boot")
    if who=="none" and n>1:
        s.run(2*MINUTE); s.start("boot")
    s.run_until(lambda: s.all_members() and s.agreed(), 12*MINUTE)
    grows(s,"p0")

@pytest.mark.parametrize(("n","who"),[c for c in CASES if c[0]>=4])
def test_half_gone(n,who):
    s=founded(n,who)
    for i in range(n//2, n): s.kill(f"p{i}")
    t=s.run_until(s.all_members, 6*MINUTE)
    assert s.machines["p0"].roster.epoch==1
    assert t>8*16
    grows(s,"p0")
