package wal

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestChainOfCrashesBesideBulkLoads is TestChainOfCrashesLosesNothing with bulk loads, which leave gaps, and an archive that reads the
// log, for which it is kept: whatever the runs end with, the archive gets every acknowledged record once, and takes no gap for damage.
// Operations on names fail, too.
func TestChainOfCrashesBesideBulkLoads(t *testing.T) {
	seed, loads := testSeed(t), 0
	for chain := range uint64(*soakChains) {
		c := &loadChain{mem: vfs.NewMem(), rng: rand.New(rand.NewPCG(seed, chain)), acknowledged: map[keys.Epoch]bool{}}
		c.seen = map[keys.Epoch]uint64{}
		if err := c.runs(); err != nil {
			t.Fatalf("chain %d: %v", chain, err)
		}
		loads += c.loads
	}
	if loads == 0 {
		t.Error("no bulk load: this tests little")
	}
}

// loadChain is a log with many runs.
type loadChain struct {
	ledger
	mem          *vfs.Mem
	rng          *rand.Rand
	archived     keys.Epoch // everything up to it was read
	acknowledged map[keys.Epoch]bool
	written      []keys.Epoch // by this run, and not known to be durable
	segment      uint64       // that the data file names
	loads        int
}

func (c *loadChain) runs() error {
	for c.run = 1; c.run <= 14; c.run++ {
		if err := c.live(); err != nil {
			return fmt.Errorf("run %d, acknowledged %d, after %d, archived %d: %w", c.run, c.acked, c.after, c.archived, err)
		}
		if c.mem.Crashed() || c.rng.IntN(3) == 0 {
			c.mem = c.mem.Crash(c.rng.Uint64(), vfs.Survival(c.rng.IntN(4)))
		}
	}
	return nil
}

// live is one run, from recovery to its end.
func (c *loadChain) live() error {
	faulty := vfs.NewFaulty(c.mem)
	c.written = nil
	if c.rng.IntN(2) == 0 {
		c.mem.CrashAt(c.mem.Mutations() + 1 + c.rng.Int64N(100))
	}
	c.inject(faulty)
	a, holder, next, err := c.open(faulty)
	if a == nil {
		return err
	}
	err = c.work(a, holder, next-1)
	if c.rng.IntN(3) > 0 {
		faulty.Inject(vfs.Rule{Op: vfs.OpMutating}) // killed
	}
	_ = a.log.Close()
	return errors.Join(err, c.twice)
}

func (c *loadChain) inject(faulty *vfs.Faulty) {
	nth := 1 + c.rng.IntN(30)
	switch c.rng.IntN(7) {
	case 4:
		faulty.Inject(vfs.Rule{Op: vfs.OpSyncDir, Nth: 1 + c.rng.IntN(8), Fault: vfs.DiscardDirty})
	case 0, 1:
		faulty.Inject(vfs.Rule{Op: vfs.OpSyncData | vfs.OpSync, Nth: nth, Fault: vfs.DiscardDirty})
	case 2:
		faulty.Inject(vfs.Rule{Op: vfs.OpWrite, Nth: nth, Fault: vfs.Torn})
	case 3:
		names := vfs.OpRename | vfs.OpRemove | vfs.OpSyncDir | vfs.OpCreate | vfs.OpPreallocate | vfs.OpTruncate | vfs.OpOpen | vfs.OpClose
		errnos := []syscall.Errno{syscall.EIO, syscall.EMFILE, syscall.EINTR} // after a full disk a start goes on without a close record
		faulty.Inject(vfs.Rule{Op: names, Nth: nth, Err: errnos[c.rng.IntN(len(errnos))]})
	}
}

// open recovers the log. It returns no log if the run ends in its start, which is allowed.
func (c *loadChain) open(fs vfs.FS) (a *appender, holder *Holder, next keys.Epoch, err error) {
	rec, err := Recover(fs, testDir, c.after, Proof{Segment: c.segment}, onlyCommits(func(e keys.Epoch, body []byte) error {
		c.acknowledged[e] = true
		return c.compare(e, body)
	}))
	if errors.Is(err, ErrCorrupt) || errors.Is(err, errWrongBody) {
		return nil, nil, 0, err
	}
	if err != nil || fs.MkdirAll(testDir) != nil {
		return nil, nil, 0, nil //nolint:nilerr // the run ended in its start, which is allowed
	}
	if rec.Last < c.acked {
		return nil, nil, 0, fmt.Errorf("the log ends at %d", rec.Last)
	}
	c.acked = rec.Last
	opts := testOptions2(fs)
	opts.Reserve = c.rng.IntN(2)
	l, err := Open(opts, rec)
	if err != nil {
		return nil, nil, 0, nil //nolint:nilerr // as above
	}
	holder = l.Hold(HolderOptions{Name: "archive", From: c.archived, Lifetime: time.Hour})
	a = &appender{log: l}
	if !c.rotate(a, rec.Next()) {
		_ = l.Close()
		return nil, nil, 0, nil
	}
	return a, holder, rec.Next(), nil
}

func (c *loadChain) compare(e keys.Epoch, body []byte) error {
	if tag, whole := isBody(body); !whole || tag != tagOf(c.seen[e], e) {
		return fmt.Errorf("epoch %d: %w", e, errWrongBody)
	}
	return nil
}

func (c *loadChain) rotate(a *appender, first keys.Epoch) bool {
	s, err := a.log.NewSegment(context.Background(), first, 0)
	if err == nil {
		a.cur.Store(s)
	}
	return err == nil
}

// work does what an engine does, in any order, until the log fails or the machine crashes.
func (c *loadChain) work(a *appender, holder *Holder, last keys.Epoch) error {
	for range 5 + c.rng.IntN(60) {
		if c.mem.Crashed() || a.log.Err() != nil {
			return nil //nolint:nilerr // the run has ended
		}
		var err error
		ok := true
		switch c.rng.IntN(12) {
		case 0:
			last, ok = c.load(a, last)
		case 1:
			c.after = max(c.after, c.acked-min(c.acked, keys.Epoch(c.rng.IntN(3))))
			c.truncate(a.log)
		case 2:
			err = c.archive(a.log, holder)
		case 3:
			_ = a.log.FillReserve()
		case 4:
			_, _ = a.log.ReleaseOldFiles()
		default:
			last, ok = c.append(a, last)
		}
		if err != nil || !ok {
			return err
		}
	}
	return c.archive(a.log, holder)
}

func (c *loadChain) truncate(l *Log) {
	c.segment = max(c.segment, l.NewestDurableHeader())
	_ = l.TruncateBefore(c.after + 1) // an error passes, or the log has failed
}

// append writes a record, and sometimes waits until it is durable.
func (c *loadChain) append(a *appender, last keys.Epoch) (keys.Epoch, bool) {
	size := c.rng.IntN(900)
	if c.rng.IntN(30) == 0 {
		size = 3 * pageSize
	}
	e, err := a.append(bodyOf(tagOf(c.run, last+1), size))
	if err != nil {
		return last, false
	}
	if run, ok := c.seen[e]; ok || e != last+1 {
		c.twice = fmt.Errorf("run %d was given epoch %d after %d; run %d had been given it", c.run, e, last, run)
	}
	c.seen[e] = c.run
	c.written = append(c.written, e)
	if c.rng.IntN(3) == 0 && a.log.Flush(e) == nil {
		c.acknowledge(e)
	}
	return e, true
}

// acknowledge records that everything up to an epoch is durable.
func (c *loadChain) acknowledge(e keys.Epoch) {
	for _, written := range c.written {
		c.acknowledged[written] = true
	}
	c.written, c.acked = nil, max(c.acked, e)
}

// load is a bulk load: the data file has everything up to its epoch. The process may end before the log knows of it.
func (c *loadChain) load(a *appender, last keys.Epoch) (keys.Epoch, bool) {
	a.cur.Load().Seal()
	if a.log.WaitDurable(context.Background(), last) != nil {
		return last, false
	}
	c.acknowledge(last)
	e := last + 50 + keys.Epoch(c.rng.IntN(100))
	c.after, c.acked, c.loads = e, e, c.loads+1
	if c.rng.IntN(5) == 0 {
		return e, false
	}
	a.log.Skip(e + 1)
	if c.rng.IntN(2) == 0 {
		c.truncate(a.log)
	}
	return e, c.rotate(a, e+1)
}

// archive reads what is durable and was not read. An error of the file system passes.
func (c *loadChain) archive(l *Log, holder *Holder) error {
	r := l.ReadFrom(c.archived+1, TailMark{})
	defer func() { _ = r.Close() }()
	for through := l.Durable(); ; {
		rec, ok, err := r.Next(through)
		if errors.Is(err, ErrCorrupt) {
			return fmt.Errorf("the archive reads from epoch %d on: %w", c.archived+1, err)
		}
		if truncated, ok := errors.AsType[*TruncatedError](err); ok { // the last that was read was no record, so that none was kept for it
			return c.read(&TailRecord{Epoch: truncated.Oldest - 1, Gap: true})
		}
		if err != nil || !ok {
			holder.Advance(c.archived) // as an archiver, it needs the last record to compare
			return nil
		}
		if err := c.read(&rec); err != nil {
			return err
		}
		c.archived = rec.Epoch
	}
}

func (c *loadChain) read(rec *TailRecord) error {
	if !rec.Gap && rec.Epoch == c.archived+1 {
		return c.compare(rec.Epoch, rec.Body)
	}
	for e := range c.acknowledged {
		if e > c.archived && e <= rec.Epoch {
			return fmt.Errorf("the archive misses epoch %d between %d and %d", e, c.archived, rec.Epoch)
		}
	}
	return nil
}
