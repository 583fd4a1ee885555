package vfs

import (
	"maps"
	"math/rand/v2"
	"slices"
)

// Survival is which unsynced changes survive a crash.
type Survival uint8

// The kinds of survival.
const (
	// SurviveSome keeps a random part; see survivingNames and tear.
	SurviveSome Survival = iota
	// SurviveNone keeps no unsynced change.
	SurviveNone
	// SurviveAll keeps everything except what a failed sync discarded.
	SurviveAll
	// SurviveProcess is the end of the process without a crash of the machine: the kernel's pages, dirty or discarded,
	// are as they were.
	SurviveProcess
)

// Crash stops the file system (every operation on it and its files returns ErrCrashed from now on) and returns the
// contents of the disk, as a new file system with the same capacity and no hook or lock. The result is a function of seed
// and of the operations before, and a test may call Crash many times with different seeds.
func (m *Mem) Crash(seed uint64, survival Survival) *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.crashed = true
	rng := rand.New(rand.NewPCG(seed, 0))
	survivor := NewMem()
	survivor.capacity = m.capacity
	survivor.dirs = maps.Clone(m.dirs)
	if survival == SurviveProcess {
		survivor.restart(m)
		return survivor
	}
	names := m.survivingNames(rng, survival)
	for _, name := range slices.Sorted(maps.Keys(names)) { // sorted: the order of random numbers must not depend on the map
		node := names[name].afterCrash(rng, survival)
		survivor.durable[name], survivor.names[name] = node, node
		survivor.used += int64(node.now.used) * memBlockSize
	}
	return survivor
}

// restart copies the state of the kernel from old, as another process finds it.
func (m *Mem) restart(old *Mem) {
	nodes := map[*memNode]*memNode{nil: nil}
	node := func(n *memNode) *memNode {
		if _, known := nodes[n]; !known {
			nodes[n] = &memNode{
				now: n.now.clone(), durable: n.durable.clone(), pending: slices.Clone(n.pending), discarded: maps.Clone(n.discarded),
				links: n.links,
			}
		}
		return nodes[n]
	}
	for name, n := range old.names {
		m.names[name] = node(n)
		m.used += int64(n.now.used) * memBlockSize
	}
	for name, n := range old.durable {
		m.durable[name] = node(n)
	}
	for _, change := range old.pending {
		change.node = node(change.node)
		m.pending = append(m.pending, change)
	}
}

// survivingNames applies a random subset of the pending name changes to the durable names. A change survives only if
// every earlier change of its names did: no file system loses a rename and keeps a later change of the same name.
func (m *Mem) survivingNames(rng *rand.Rand, survival Survival) map[string]*memNode {
	names := maps.Clone(m.durable)
	if survival == SurviveNone {
		return names
	}
	likely := rng.Float64()
	lost := map[string]bool{}
	for _, change := range m.pending {
		survives := (survival == SurviveAll || rng.Float64() < likely) && !change.discarded
		for _, name := range change.touched() {
			survives = survives && !lost[name]
		}
		if survives {
			applyName(names, change)
			continue
		}
		for _, name := range change.touched() {
			lost[name] = true
		}
	}
	return names
}

// afterCrash is the file as the disk may hold it. The node itself is not changed.
func (n *memNode) afterCrash(rng *rand.Rand, survival Survival) *memNode {
	disk := n.durable.clone()
	switch {
	case survival == SurviveNone || len(n.pending) == 0:
	case survival == SurviveAll:
		for _, change := range n.pending {
			disk.apply(change)
		}
	default:
		newTear(rng, len(n.pending)).apply(disk, n.pending)
	}
	return &memNode{now: disk.clone(), durable: disk, links: 1}
}

// tear decides which of a file's unsynced changes reached the disk.
//
// Each sector was last written at a time of its own, so it has all changes before that time and none after it. A disk
// with atomic sectors can do nothing else, and this includes prefixes, torn writes and reordering. The size has a time
// too. A time is a number of changes.
type tear struct {
	changes int
	shape   tearShape
	salt    uint64
	time    int // of the size, and in tearPrefix of everything
}

type tearShape int

// Uniform times alone would almost never leave a long log nearly complete or nearly empty, where the interesting
// failures are.
const (
	tearPrefix  tearShape = iota // everything before one change, which is torn
	tearUniform                  // each sector at any time
	tearFew                      // one sector in eight has unsynced changes, the others have none
	tearMost                     // one sector in eight is old, the others have all changes
	tearShapes
)

func newTear(rng *rand.Rand, changes int) *tear {
	return &tear{
		changes: changes,
		shape:   tearShape(rng.IntN(int(tearShapes))),
		salt:    rng.Uint64(),
		time:    rng.IntN(changes + 1),
	}
}

// sectorTime is how many of the changes the sector has. It is a hash, so that it needs no memory.
func (t *tear) sectorTime(sector int64) int {
	h := mix(t.salt + uint64(sector)*0x9e3779b97f4a7c15)
	exception := h&7 == 0
	switch {
	case t.shape == tearPrefix:
		return t.time + int(h&1)
	case t.shape == tearFew && !exception:
		return 0
	case t.shape == tearMost && !exception:
		return t.changes
	}
	return int((h >> 8) % uint64(t.changes+1))
}

// mix is the finisher of SplitMix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// apply applies the surviving changes to disk, the durable image.
func (t *tear) apply(disk *memImage, changes []contentChange) {
	size := disk.size
	for i, change := range changes {
		sized := i < t.time // the size after this change is on the disk
		switch {
		case change.kind == OpWrite:
			t.applyWrite(disk, i, change)
			if sized {
				size = max(size, change.off+int64(len(change.data)))
			}
		case sized:
			disk.apply(change)
			if change.kind == OpTruncate {
				size = change.size
			} else {
				size = max(size, change.size)
			}
		}
	}
	disk.truncate(size)
}

// applyWrite writes the sectors that have change number i, run by run.
func (t *tear) applyWrite(disk *memImage, i int, change contentChange) {
	end := change.off + int64(len(change.data))
	runStart := int64(-1)
	for at := change.off; at < end; {
		if i < t.sectorTime(at/sectorSize) {
			if runStart < 0 {
				runStart = at
			}
		} else if runStart >= 0 {
			disk.write(change.data[runStart-change.off:at-change.off], runStart)
			runStart = -1
		}
		at += sectorSize - at%sectorSize
	}
	if runStart >= 0 {
		disk.write(change.data[runStart-change.off:], runStart)
	}
}
