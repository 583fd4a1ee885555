package storage

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

var quarantineSeeds = flag.Uint64("quarantine.seeds", 3, "runs of TestQuarantineInAnyOrder")

// quarantineChain is one run of TestQuarantineInAnyOrder.
type quarantineChain struct {
	*quarantineBench
	faulty    *vfs.Faulty
	rng       *rand.Rand
	keys      []string
	snapshots []snapshotOf
	damaged   bool // a page of the data file
	ended     bool // damage keeps the store from starting, or a checkpoint from its end
	trace     []string
	total     map[string]int
}

// snapshotOf is what a snapshot must show.
type snapshotOf struct {
	at   keys.Epoch
	want map[string]string
}

func (c *quarantineChain) tracef(format string, args ...any) {
	c.trace = append(c.trace, fmt.Sprintf(format, args...))
}

func (c *quarantineChain) write() {
	for range 1 + c.rng.IntN(12) {
		key, value := c.keys[c.rng.IntN(len(c.keys))], strings.Repeat(fmt.Sprintf("%08d", c.rng.IntN(1e8)), 1+c.rng.IntN(1+c.rng.IntN(100)))
		if c.rng.IntN(3) == 0 {
			value = ""
		}
		c.set(key, value)
		c.tracef("set %.12q %d bytes at %d", key, len(value), c.visible.Load())
	}
	if err := c.engine.WaitDurable(context.Background(), keys.Epoch(c.visible.Load())); err != nil {
		c.t.Fatal(err)
	}
}

func (c *quarantineChain) checkpoint() {
	if c.rng.IntN(3) == 0 {
		c.fs.CrashAt(c.fs.Mutations() + 1 + c.rng.Int64N(40))
	}
	var live []keys.Epoch
	for _, s := range c.snapshots {
		live = append(live, s.at)
	}
	var fault *vfs.Injected
	if c.rng.IntN(4) == 0 {
		rule := vfs.Rule{
			Op: []vfs.Op{vfs.OpWrite, vfs.OpSync | vfs.OpSyncData, vfs.OpMutating}[c.rng.IntN(3)], Name: []string{"*quarantine*", "data.ekv", "*"}[c.rng.IntN(3)], Nth: 1 + c.rng.IntN(6),
			Err: []error{syscall.EIO, syscall.ENOSPC}[c.rng.IntN(2)], Fault: vfs.Fail,
		}
		if rule.Op == vfs.OpSync|vfs.OpSyncData && c.rng.IntN(2) == 0 {
			rule.Fault = vfs.DiscardDirty
		}
		if c.rng.IntN(4) == 0 { // the names of new files are lost
			rule = vfs.Rule{Op: vfs.OpSyncDir, Nth: 1, Fault: vfs.DiscardDirty, Err: syscall.EIO}
		}
		fault = c.faulty.Inject(rule)
		c.tracef("%+v", rule)
	}
	err := c.checkpointAt(live...)
	c.tracef("checkpoint beside snapshots %v: %v", live, err)
	fired := false
	if fault != nil {
		fired = fault.Fired() > 0
		fault.Remove()
	}
	switch {
	case c.fs.Crashed() || c.engine.Err() != nil:
		c.crash()
	case err != nil && fired:
		c.total["faulted"]++
	case err != nil && c.damaged && isDamaged(err):
		c.ended = true
	case err != nil:
		c.t.Fatal(err)
	default:
		c.total["quarantined"] += c.engine.Stats().Quarantine.Versions
	}
	if c.fs.CrashAt(0); c.fs.Crashed() && !c.ended { // what a checkpoint leaves to the background
		c.crash()
	}
}

func (c *quarantineChain) disk(fs *vfs.Mem) {
	c.fs, c.faulty = fs, vfs.NewFaulty(fs)
	c.options.FS = c.faulty
}

func isDamaged(err error) bool { return errors.Is(err, ErrDamaged) || IsDamage(err) }

func (c *quarantineChain) crash() {
	c.total["crash"]++
	c.tracef("crash")
	survival := func() vfs.Survival {
		return []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll, vfs.SurviveProcess}[c.rng.IntN(4)]
	}
	left := c.fs.Crash(c.rng.Uint64(), survival())
	_ = c.engine.Close()
	c.disk(left)
	if c.rng.IntN(2) == 0 {
		left.CrashAt(1 + c.rng.Int64N(40))
		if err := c.open(); err == nil {
			_ = c.checkpointAt()
			_ = c.engine.Close()
		}
		left = left.Crash(c.rng.Uint64(), survival())
		c.disk(left)
	}
	c.start()
}

func (c *quarantineChain) start() {
	c.snapshots = nil
	err := c.open()
	if err != nil && c.damaged && isDamaged(err) {
		c.total["refused"]++
		c.ended = true
	} else if err != nil {
		c.t.Fatal(err)
	}
}

// damage writes over a part of a file.
func (c *quarantineChain) damage(path string, at func(size int64) int64) {
	f, err := c.fs.Open(path, vfs.ReadWrite)
	if err != nil {
		c.t.Fatal(err)
	}
	size, err := f.Size()
	offset := at(size)
	_, write := f.WriteAt([]byte("damage"), offset)
	if err := errors.Join(err, write, f.Sync(), f.Close()); err != nil {
		c.t.Fatal(err)
	}
	c.tracef("damage of %s at %d", path, offset)
}

func (c *quarantineChain) restart(withDamage bool) {
	number := c.engine.checkpoints.quarantine.used
	c.mustClose()
	c.tracef("restart")
	switch c.rng.IntN(3) {
	case 0:
		if number != 0 {
			c.damage(quarantinePaths("db")[number-1], func(size int64) int64 { return c.rng.Int64N(2)*(size/2) + 8 })
			c.total["half a quarantine"]++
		}
	case 1:
		if withDamage {
			page := int64(c.options.PageSize)
			c.damage(Files{c.fs, "db"}.DataPath(), func(size int64) int64 { return (2+c.rng.Int64N(size/page-2))*page + c.rng.Int64N(page-6) })
			c.damaged = true
		}
	}
	c.start()
}

// look compares everything with what it must be.
func (c *quarantineChain) look() {
	c.t.Helper()
	for _, s := range append(c.snapshots, snapshotOf{keys.Epoch(c.visible.Load()), c.want}) {
		if !c.damaged {
			c.check(s.at, s.want)
			continue
		}
		r := c.engine.NewReader()
		c.slot.Enter()
		for _, key := range c.keys {
			v, ok, err := r.Get(keys.Append(nil, keys.SpaceUser, []byte(key)), s.at)
			got := []byte(nil)
			if err == nil && ok && v.Kind == keys.KindSet {
				got, err = r.AppendValue(nil, v)
			}
			if err != nil && !isDamaged(err) || err == nil && string(got) != s.want[key] {
				c.t.Fatalf("%.20q at %d is %.20q, want %.20q: %v", key, s.at, got, s.want[key], err)
			}
		}
		c.slot.Leave()
	}
}

func (c *quarantineChain) snapshot() {
	if n := len(c.snapshots); n > 2 || n > 0 && c.rng.IntN(2) == 0 {
		i := c.rng.IntN(n)
		c.snapshots = append(c.snapshots[:i:i], c.snapshots[i+1:]...)
		return
	}
	at := keys.Epoch(c.visible.Load())
	if n := len(c.snapshots); n == 0 || c.snapshots[n-1].at < at {
		c.snapshots = append(c.snapshots, snapshotOf{at, maps.Clone(c.want)})
	}
}

func (c *quarantineChain) step(withDamage bool) {
	switch n := c.rng.IntN(100); {
	case n < 45:
		c.write()
	case n < 75:
		c.checkpoint()
	case n < 85:
		c.snapshot()
	case n < 91:
		disturbs := c.options.disturb == nil
		if c.options.disturb = nil; disturbs {
			c.options.disturb = disturb
		}
		c.engine.options.disturb = c.options.disturb
		c.tracef("disturbs: %v", disturbs)
	case n < 96:
		c.restart(withDamage)
	default:
		c.crash()
	}
	if !c.ended && c.rng.IntN(3) == 0 {
		c.look()
	}
}

// TestQuarantineInAnyOrder: keys that the tree refuses now and then are written, deleted and read beside snapshots, across
// restarts, crashes at any operation of a checkpoint and of a recovery, and damage of a copy of the quarantine and of pages.
// No read is wrong.
func TestQuarantineInAnyOrder(t *testing.T) {
	total := map[string]int{}
	for seed := range max(*quarantineSeeds/exhaustiveStep, 1) {
		c := &quarantineChain{quarantineBench: newQuarantineBench(t, vfs.NewMem()), rng: rand.New(rand.NewPCG(seed, 5)), total: total}
		c.keys = append(refused(), refused()...)
		for i := range 60 {
			c.keys = append(c.keys, fmt.Sprintf("key-%05d", i))
		}
		c.disk(c.fs)
		withDamage := c.rng.IntN(3) == 0
		c.mustOpen()
		failed := true
		func() {
			defer func() {
				if failed {
					t.Logf("seed %d:\n%s", seed, strings.Join(c.trace, "\n"))
				}
			}()
			for step := 0; step < 100 && !c.ended; step++ {
				c.step(withDamage)
			}
			if !c.ended {
				c.look()
				if quarantined := c.engine.Stats().Quarantine.Versions > 0; !c.damaged {
					c.checkOffline(quarantined)
				} else {
					_ = c.engine.Close()
				}
			}
			failed = false
		}()
	}
	t.Log(total)
}
