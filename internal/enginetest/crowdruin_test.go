package enginetest

import (
	"context"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// ruin damages a copy of the files that are not open, and lets an operator do what is possible: verification and salvage end, salvage
// brings out nothing that was never written, and after repair-log the store starts, with the commits up to one epoch.
func (c *crowd) ruin() {
	c.Helper()
	old := c.mem
	c.mem = old.Crash(1, vfs.SurviveProcess)
	copied := old.Crash(1, vfs.SurviveProcess)
	copied.SetCapacity(crowdCapacity)
	c.mem.SetCapacity(crowdCapacity)
	sub := &crowd{T: c.T, rng: c.rng, mem: copied, o: c.o, members: c.members, total: c.total, faults: c.faults, rounds: c.rounds}
	sub.o.Storage.FS, sub.o.Storage.StallMax = copied, 30*time.Second
	inLog, inData := c.rng.IntN(3) > 0, false
	if !inLog || c.rng.IntN(4) == 0 {
		inData = true
	}
	if inLog {
		sub.ruinLog()
	}
	if inData {
		for range 1 + c.rng.IntN(3) {
			sub.flipByte(dataFile, c.rng.IntN(8) == 0)
		}
		sub.faults = true
	}
	sub.recoverRuin(inLog)
}

// ruinLog damages the log.
func (c *crowd) ruinLog() {
	c.Helper()
	dir := wal.Dir("db")
	names, err := c.mem.List(dir)
	if err != nil {
		c.Fatal(err)
	}
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasSuffix(n, ".log") })
	if len(names) == 0 {
		return
	}
	slices.Sort(names)
	name := path.Join(dir, names[c.rng.IntN(len(names))])
	if c.rng.IntN(2) == 0 {
		name = path.Join(dir, names[len(names)-1-c.rng.IntN(min(3, len(names)))])
	}
	switch c.rng.IntN(6) {
	case 0:
		if err := c.mem.Remove(name); err != nil {
			c.Fatal(err)
		}
	case 1:
		f, err := c.mem.Open(name, vfs.ReadWrite)
		if err != nil {
			c.Fatal(err)
		}
		size, _ := f.Size()
		if err := f.Truncate(c.rng.Int64N(size + 1)); err != nil {
			c.Fatal(err)
		}
		_ = f.Close()
	default:
		for range 1 + c.rng.IntN(3) {
			c.flipByte(name, c.rng.IntN(4) == 0)
		}
	}
}

// flipByte flips a bit of a file, perhaps near its beginning.
func (c *crowd) flipByte(name string, early bool) {
	c.Helper()
	f, err := c.mem.Open(name, vfs.ReadWrite)
	if err != nil {
		c.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	size, err := f.Size()
	if err != nil || size == 0 {
		return
	}
	at := c.rng.Int64N(size)
	if early {
		at = c.rng.Int64N(min(size, 600))
	}
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		c.Fatal(err)
	}
	b[0] ^= 1 << c.rng.IntN(8)
	if _, err := f.WriteAt(b[:], at); err != nil {
		c.Fatal(err)
	}
}

func (c *crowd) recoverRuin(inLog bool) {
	c.Helper()
	if _, err := inspect.VerifyDir(context.Background(), c.mem, "db", inspect.VerifyOptions{}); err != nil && !asDamage(err) {
		c.Errorf("round %d: verify what is ruined: %v", c.rounds, err)
	}
	c.checkRuinSalvage()
	s, err := mvcc.Open(c.o)
	parts := false
	if err != nil && asDamage(err) {
		c.count("ruined")
		dropped, failed := inspect.RepairLog(c.mem, "db")
		parts = dropped.Parts != 0
		if failed != nil && !(c.faults && asDamage(failed)) {
			c.Errorf("round %d: repair-log: %v after %v", c.rounds, failed, err)
			return
		}
		if s, failed = mvcc.Open(c.o); failed != nil && !(c.faults && asDamage(failed)) {
			c.Errorf("round %d: open after repair-log: %v after %v; %+v", c.rounds, failed, err, dropped)
			return
		}
		err = failed
		if err == nil {
			c.count("repaired")
		}
	}
	if err != nil {
		if !asDamage(err) {
			c.Errorf("round %d: open what is ruined: %v", c.rounds, err)
		}
		return
	}
	c.s = s
	x := mustSession(c, s)
	if !parts {
		if serials := c.snapshot(x, false, false); serials != nil {
			c.checkOrder(serials)
		}
	}
	if _, err := put(x, "~", "goes on", mvcc.DurabilitySync); err != nil {
		c.Errorf("round %d: a ruined store that has started takes no commit: %v", c.rounds, err)
	}
	x.Close()
	if err := s.Close(); err != nil && !(c.faults && asDamage(err)) {
		c.Errorf("round %d: close what was ruined: %v", c.rounds, err)
	}
}

// checkRuinSalvage checks that each value that comes out was written.
func (c *crowd) checkRuinSalvage() {
	c.Helper()
	of := map[string][2]int{}
	for i, m := range c.members {
		for j, k := range m.keys {
			of[k] = [2]int{i, j}
		}
	}
	_, err := inspect.Salvage(context.Background(), c.mem, "db", func(e *inspect.Salvaged) error {
		at, known := of[string(e.Key)]
		if !known {
			c.Errorf("round %d: salvage brings out %.40q", c.rounds, e.Key)
			return nil
		}
		m, v := c.members[at[0]], string(e.Value)
		serial, err := strconv.ParseInt(v[:max(0, strings.IndexByte(v, ':'))], 10, 64)
		if err != nil || serial > m.begun.Load() || m.value(serial, at[1]) != v || m.refused[serial] {
			c.Errorf("round %d: salvage: %.40q has %.40q, which was never written", c.rounds, e.Key, v)
		}
		return nil
	})
	if err != nil && !asDamage(err) {
		c.Errorf("round %d: salvage what is ruined: %v", c.rounds, err)
	}
	c.count("salvage of a ruin")
}
