package enginetest

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"time"

	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

func (c *crowd) checkpoint(rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	if rng.IntN(3) == 0 {
		ctx, cancel = context.WithTimeout(context.Background(), time.Duration(rng.IntN(5000))*time.Microsecond)
	}
	defer cancel()
	if err := c.s.Checkpoint(ctx); err != nil && !c.bearable(err) && !c.refusal(err) {
		c.Errorf("round %d: checkpoint: %v", c.rounds, err)
	}
}

func (c *crowd) resize(rng *rand.Rand) {
	size := int64(16*c.o.Storage.PageSize) + rng.Int64N(2*c.o.Storage.CacheBytes)
	if rng.IntN(2) == 0 {
		size = int64((16 + rng.IntN(8)) * c.o.Storage.PageSize)
	}
	if _, err := c.s.ResizeCache(size); err != nil {
		c.Errorf("resize: %v", err)
	}
}

func (c *crowd) verify(*rand.Rand) {
	report, err := c.s.Verify(context.Background(), inspect.VerifyOptions{})
	var ended *wal.HolderEndedError
	switch {
	case errors.As(err, &ended) && c.full:
	case err != nil:
		if !c.bearable(err) && !c.failing {
			c.Errorf("round %d: verify: %v", c.rounds, err)
		}
	case !c.faults && (!report.OK() || !report.Accounted) && !c.mem.Crashed():
		c.Errorf("round %d: %d damages, accounted %v, checkpoint %d at epoch %d: %+v", c.rounds, report.DamageTotal, report.Accounted, report.Checkpoint, report.Epoch, report.Damages)
	default:
		c.count("verification")
	}
}

func (c *crowd) space(*rand.Rand) {
	if _, err := c.s.Space(context.Background(), inspect.SpaceOptions{}); err != nil && !c.bearable(err) && !c.failing {
		c.Errorf("round %d: space: %v", c.rounds, err)
	}
}

// follow reads the log for a while, held or not.
func (c *crowd) follow(rng *rand.Rand) {
	log := c.s.Changes()
	var hold *wal.Holder
	from := log.OldestInLog()
	if rng.IntN(2) == 0 {
		hold = log.Hold(wal.HolderOptions{Name: "test", Owner: "test", From: from, Lifetime: time.Minute, Yields: rng.IntN(2) == 0})
		defer hold.Release()
		if oldest := log.OldestInLog(); oldest > from { // it was truncated before it was held
			from = oldest
		}
	}
	acknowledged := c.acknowledged()
	through := log.Stable()
	found := map[keys.Epoch]bool{}
	r := log.ReadLog(from, wal.TailMark{})
	defer func() { _ = r.Close() }() // it was only read
	last := max(from, 1) - 1
	for range 1 + rng.IntN(4) {
		for {
			rec, ok, err := r.Next(through)
			var truncated *wal.TruncatedError
			if errors.As(err, &truncated) && (hold == nil || hold.Renew() != nil) {
				return
			}
			if truncated != nil && err != nil { // before this run: a crash has brought back a part of what was given up
				for _, e := range acknowledged {
					if e > last && e < truncated.Oldest {
						c.Errorf("round %d: the log is held from epoch %d on, and lacks epochs from %d to %d, of which %d was acknowledged", c.rounds, from, last+1, truncated.Oldest, e)
						return
					}
				}
				last, from = truncated.Oldest-1, truncated.Oldest
				_ = r.Close()
				r = log.ReadLog(from, wal.TailMark{})
				c.count("log with a hole")
				continue
			}
			if err != nil {
				if !c.bearable(err) && !c.failing {
					c.Errorf("round %d: the log from %d to %d: %v", c.rounds, last+1, through, err)
				}
				return
			}
			if !ok {
				break
			}
			if rec.Epoch <= last || !rec.Gap && rec.Epoch != last+1 {
				c.Errorf("round %d: the log has epoch %d after epoch %d", c.rounds, rec.Epoch, last)
			}
			last = rec.Epoch
			found[rec.Epoch] = !rec.Gap
		}
		if last < through && r.Position() <= through {
			c.Errorf("round %d: the log ends at %d, and is stable through %d", c.rounds, last, through)
		}
		for _, e := range acknowledged {
			if e >= from && e <= through && !found[e] {
				c.Errorf("round %d: the log from %d to %d lacks epoch %d", c.rounds, from, through, e)
			}
		}
		c.count("log")
		time.Sleep(time.Duration(rng.IntN(3000)) * time.Microsecond)
		acknowledged, through = c.acknowledged(), log.Stable()
	}
}

// acknowledged are the epochs of commits that are in the log.
func (c *crowd) acknowledged() (list []keys.Epoch) {
	for _, m := range c.members {
		if m.kind == memberLoads {
			continue
		}
		m.mu.Lock()
		for _, e := range m.epochs {
			list = append(list, e)
		}
		m.mu.Unlock()
	}
	return list
}

// pinCopy makes a backup, and restores it.
func (c *crowd) pinCopy(rng *rand.Rand) {
	if rng.IntN(10) > 0 || c.faults {
		return
	}
	dir, err := os.MkdirTemp("", "crowd")
	if err != nil {
		c.Error(err)
		return
	}
	defer func() { _ = os.RemoveAll(dir) }()
	target, err := objectstore.Open(dir, objectstore.Options{})
	if err != nil {
		c.Error(err)
		return
	}
	m, err := backup.Create(context.Background(), c.s, target, backup.Options{})
	if err != nil {
		if !c.bearable(err) && !c.refusal(err) && !errors.Is(err, storage.ErrUnfinishedMerge) {
			c.Errorf("round %d: backup: %v", c.rounds, err)
		}
		return
	}
	fs := vfs.NewMem()
	if err := fs.MkdirAll("db"); err != nil {
		c.Error(err)
	}
	if err := backup.RestoreBase(context.Background(), target, m, fs, "db", backup.RestoreOptions{}); err != nil {
		c.Errorf("round %d: restore: %v", c.rounds, err)
		return
	}
	o := c.o
	o.Storage.FS, o.Storage.DataFS = fs, nil
	s, err := mvcc.Open(o)
	if err != nil {
		c.Errorf("round %d: restored: %v", c.rounds, err)
		return
	}
	x, err := openSession(s)
	if err == nil {
		c.snapshot(x, false, false)
		x.Close()
	}
	if err := s.Close(); err != nil {
		c.Errorf("round %d: close what was restored: %v", c.rounds, err)
	}
	c.count("backup")
}

// disturb fills the disk, damages a page, or lets an operation fail.
func (c *crowd) disturb(rng *rand.Rand) {
	switch rng.IntN(6) {
	case 0:
		if c.full {
			c.squeeze(rng)
		}
	case 1:
		if c.faults && rng.IntN(4) == 0 {
			c.damage(rng)
		}
	case 2:
		if c.failing && rng.IntN(3) == 0 {
			u := uproar{rng: rng}
			rule := c.faulty[rng.IntN(len(c.faulty))].Inject(u.failure())
			time.Sleep(time.Duration(rng.IntN(5000)) * time.Microsecond)
			rule.Remove()
			c.count("failure")
		}
	case 3:
		if rng.IntN(10) == 0 {
			if _, err := c.s.FinalizeUpgrade(context.Background()); err != nil && !c.bearable(err) && !c.refusal(err) {
				c.Errorf("round %d: upgrade: %v", c.rounds, err)
			}
		}
	}
}

func (c *crowd) squeeze(rng *rand.Rand) {
	free, err := c.mem.Free("db")
	if err != nil {
		return
	}
	c.mem.SetCapacity(crowdCapacity - free + rng.Int64N(300<<10))
	time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
	c.mem.SetCapacity(crowdCapacity)
	c.count("squeeze")
}

// damage flips a bit of a page.
func (c *crowd) damage(rng *rand.Rand) {
	size, err := c.base().Size(dataFile)
	pages := int(size) / c.o.Storage.PageSize
	if err != nil || pages < 5 {
		return
	}
	f, err := c.base().Open(dataFile, vfs.ReadWrite)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	at := int64((2+rng.IntN(pages-2))*c.o.Storage.PageSize + rng.IntN(c.o.Storage.PageSize))
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err == nil {
		b[0] ^= 1 << rng.IntN(8)
		_, _ = f.WriteAt(b[:], at)
		c.count("damage")
	}
}
