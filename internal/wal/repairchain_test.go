package wal

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestChainOfRepairsGivesNoEpochTwice runs one log many times, and damages it between two runs: a bit, the end or the whole of a file, or a
// page that the device cannot read until the next start. A log that is refused is repaired, which a crash may interrupt. Each run has the records
// before the damage, and no epoch is given out twice.
func TestChainOfRepairsGivesNoEpochTwice(t *testing.T) {
	seed := testSeed(t)
	repaired := 0
	for chain := range uint64(max(*soakChains/10, 1)) {
		c := &repairChain{chained: chained{mem: vfs.NewMem(), rng: rand.New(rand.NewPCG(seed, chain))}}
		c.seen = map[keys.Epoch]uint64{}
		if chain%2 == 1 {
			c.lineage = testLineage
		}
		for c.run = 1; c.run <= 10; c.run++ {
			if err := c.step(); err != nil {
				t.Fatalf("chain %d, run %d, acknowledged %d, after %d: %v", chain, c.run, c.acked, c.after, err)
			}
		}
		repaired += c.repaired
	}
	if repaired == 0 {
		t.Error("no log was repaired: this tests nothing")
	}
}

// repairChain is a log with many runs that is damaged between them.
type repairChain struct {
	chained
	repaired int
}

// step is one run, and the damage after it.
func (c *repairChain) step() error {
	if err := c.live(); err != nil {
		return err
	}
	if c.mem.Crashed() || c.rng.IntN(3) == 0 {
		c.mem = c.mem.Crash(c.rng.Uint64(), vfs.Survival(c.rng.IntN(3)))
	}
	if c.rng.IntN(3) == 0 {
		return nil
	}
	c.mem.CrashAt(0)
	page := c.damage()
	for range 20 {
		fs := vfs.NewFaulty(c.mem)
		if page != nil {
			fs.Inject(*page)
		}
		rec, err := Recover(fs, testDir, c.after, Proof{Lineage: c.lineage}, onlyCommits(c.recovered))
		if err == nil {
			c.acked = rec.Last // damage at the very end cannot be told from a torn record
			return c.start(fs, rec)
		}
		if !errors.Is(err, ErrCorrupt) {
			return err
		}
		if err := c.repair(fs, err); err != nil {
			return err
		}
	}
	return errors.New("the log is still damaged after twenty repairs")
}

// start opens a log, and closes it at once.
func (c *repairChain) start(fs vfs.FS, rec Recovery) error {
	opts := testOptions2(fs)
	opts.Lineage = c.lineage
	a, err := startLog(opts, rec)
	if err != nil {
		return err
	}
	return a.log.Close()
}

// repair repairs a log that was refused, perhaps until a crash.
func (c *repairChain) repair(fs vfs.FS, cause error) error {
	if c.rng.IntN(2) == 0 {
		c.mem.CrashAt(c.mem.Mutations() + 1 + c.rng.Int64N(12))
	}
	dropped, err := Repair(fs, testDir, c.after, Proof{Lineage: c.lineage})
	if c.mem.Crashed() {
		c.mem = c.mem.Crash(c.rng.Uint64(), vfs.Survival(c.rng.IntN(3)))
		return nil
	}
	c.mem.CrashAt(0)
	c.repaired++
	if err != nil || dropped.Cause == nil {
		return fmt.Errorf("repair after %w: %+v, %w", cause, dropped, err)
	}
	return nil
}

// damage damages a file of the log, or returns the page of it that cannot be read. It leaves the newest file its skip record, and those of
// repairs whole: if a crash has lost all records after it, nothing else tells which epochs were given out.
func (c *repairChain) damage() (page *vfs.Rule) {
	names, err := c.mem.List(Dir(testDir))
	segments, failed := Segments(c.mem, testDir)
	if errors.Join(err, failed) != nil || len(segments) == 0 {
		return nil
	}
	name := names[c.rng.IntN(len(names))]
	file := path.Join(Dir(testDir), name)
	size, _ := c.mem.Size(file)
	if !strings.HasSuffix(name, fileSuffix) || size == 0 || slices.ContainsFunc(segments, func(s SegmentInfo) bool { return s.File == file && c.ofRepair(s) }) {
		return nil
	}
	newest := segments[len(segments)-1].File
	at := c.rng.Int64N(size)
	if c.rng.IntN(4) == 0 {
		at = c.rng.Int64N(min(size, headerSize))
	}
	f, err := c.mem.Open(file, vfs.ReadWrite)
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	switch c.rng.IntN(5) {
	case 0:
		if file < newest {
			_ = c.mem.Remove(file)
		}
	case 1:
		_ = f.Truncate(max(at, headerPage+skipSpace))
	case 2:
		return &vfs.Rule{Op: vfs.OpRead, Name: name, Fault: vfs.Unreadable, Bytes: int(at)}
	default:
		if file == newest && at >= headerPage {
			at = max(at, headerPage+skipSpace)
		}
		var b [1]byte
		_, _ = f.ReadAt(b[:], at)
		b[0] ^= 1 << c.rng.IntN(8)
		_, _ = f.WriteAt(b[:], at)
	}
	_ = f.Sync()
	_ = c.mem.SyncDir(Dir(testDir))
	return nil
}

// ofRepair reports whether a repair has made a segment, or cannot tell.
func (c *repairChain) ofRepair(s SegmentInfo) (is bool) {
	err := ReadSegment(c.mem, s, func(r Record) error {
		is = is || r.SkipsTo() > r.Epoch+EpochWindow
		return nil
	})
	return is || err != nil
}

// TestAStartCompletesAnInterruptedRepair: a repair of a page that cannot be read is interrupted at each of its operations, the log goes on, and the page
// can be read again.
func TestAStartCompletesAnInterruptedRepair(t *testing.T) {
	for _, lineage := range []keys.Lineage{{}, testLineage} {
		opts := testOptions(vfs.NewMem(), 2*SegmentBytesMin)
		opts.Lineage = lineage
		a := mustStart(t, opts)
		for i := range 80 {
			if _, err := a.put(bodyOf(uint64(i), 500)); err != nil {
				t.Fatal(err)
			}
		}
		whole := opts.FS.(*vfs.Mem).Crash(1, vfs.SurviveAll)
		rec, _ := mustReplay(t, whole, 0)
		bad := rec.Segments[1]
		for crash, interrupted := int64(1), true; interrupted; crash++ {
			mem := whole.Crash(1, vfs.SurviveProcess)
			unreadable := func() *vfs.Faulty {
				faulty := vfs.NewFaulty(mem)
				faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: path.Base(bad.File), Fault: vfs.Unreadable, Bytes: headerPage + pageSize})
				return faulty
			}
			mem.CrashAt(mem.Mutations() + crash)
			_, err := Repair(unreadable(), testDir, 0, Proof{Lineage: lineage})
			if interrupted = mem.Crashed(); interrupted {
				mem = mem.Crash(1, vfs.SurviveAll)
			} else if err != nil {
				t.Fatal(err)
			}
			mem.CrashAt(0)
			if _, err := Repair(unreadable(), testDir, 0, Proof{Lineage: lineage}); err != nil { // it does nothing to a log that a replay accepts
				t.Fatal(err)
			}
			opts.FS = unreadable()
			if rec, err = Recover(opts.FS, testDir, 0, Proof{Lineage: lineage}, func(Commit) error { return nil }); err != nil {
				t.Fatalf("after a crash at operation %d: %v", crash, err)
			}
			a, err := startLog(opts, rec)
			if err != nil {
				t.Fatal(err)
			}
			e, err := a.put(bodyOf(1, 100))
			if err != nil {
				t.Fatal(err)
			}
			mustClose(t, a.log)
			if rec, err := Recover(mem, testDir, 0, Proof{Lineage: lineage}, func(Commit) error { return nil }); err != nil || rec.Last != e {
				t.Errorf("lineage %v, crash at operation %d: the log ends at epoch %d, %v; want %d", lineage, crash, rec.Last, err, e)
			}
		}
	}
}
