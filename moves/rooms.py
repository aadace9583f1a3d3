"""Count rooms and arrows: rooms.py [package]"""
import sys, collections, grimp
g = grimp.build_graph("harness", "reference_engine", include_external_packages=False, cache_dir=None)
def room(m):
    p = m.split(".")
    return ".".join(p[:2]) if p[0]=="harness" else p[0]
edges=collections.Counter()
for m in g.modules:
    for d in g.find_modules_directly_imported_by(m):
        if room(m)!=room(d): edges[(room(m),room(d))]+=1
rooms={r for e in edges for r in e}
print(len(rooms),"rooms",len(edges),"arrows")
if len(sys.argv)>1:
    q=sys.argv[1]
    for (a,b),n in sorted(edges.items()):
        if q in (a,b): print(a,"->",b,n)
# circles
import itertools
adj=collections.defaultdict(set)
for a,b in edges: adj[a].add(b)
def reach(a,b,seen):
    if b in adj[a]: return True
    for c in adj[a]-seen:
        seen.add(c)
        if reach(c,b,seen): return True
    return False
print("circles:", [a for a in rooms if reach(a,a,set())])
