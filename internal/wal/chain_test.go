package wal

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

var soakChains = flag.Int("soak.chains", 150, "chains of runs in TestChainOfCrashesLosesNothing and TestChainOfCrashesBesideBulkLoads; a tenth in TestChainOfRepairsGivesNoEpochTwice")

// TestChainOfCrashesLosesNothing runs one log many times. Each run ends differently: the log is closed, the process is
// killed, or the machine crashes. In most runs a write or a sync fails before, after which the kernel may count dirty
// pages as clean; the failure or the crash may also happen in recovery. All later runs have what a run acknowledged or
// recovered, and no epoch is given out twice.
func TestChainOfCrashesLosesNothing(t *testing.T) {
	seed := testSeed(t)
	for chain := range uint64(*soakChains) {
		if err := runChain(rand.New(rand.NewPCG(seed, chain))); err != nil {
			t.Fatalf("chain %d: %v", chain, err)
		}
	}
}

// chained is a log with many runs.
type chained struct {
	ledger
	mem     *vfs.Mem
	rng     *rand.Rand
	lineage keys.Lineage // zero for segments of version 1
}

func runChain(rng *rand.Rand) error {
	c := &chained{mem: vfs.NewMem(), rng: rng}
	c.seen = map[keys.Epoch]uint64{}
	for c.run = 1; c.run <= 12; c.run++ {
		if err := c.live(); err != nil {
			return fmt.Errorf("run %d, acknowledged %d, after %d: %w", c.run, c.acked, c.after, err)
		}
		if c.mem.Crashed() || rng.IntN(3) == 0 {
			c.mem = c.mem.Crash(rng.Uint64(), vfs.Survival(rng.IntN(3)))
		}
	}
	return nil
}

// live is one run, from recovery to its end.
func (c *chained) live() error {
	faulty := vfs.NewFaulty(c.mem)
	if c.rng.IntN(2) == 0 {
		c.mem.CrashAt(c.mem.Mutations() + 1 + c.rng.Int64N(80))
	}
	switch c.rng.IntN(4) {
	case 0, 1:
		faulty.Inject(vfs.Rule{Op: vfs.OpSyncData | vfs.OpSync, Nth: 1 + c.rng.IntN(30), Fault: vfs.DiscardDirty})
	case 2:
		faulty.Inject(vfs.Rule{Op: vfs.OpWrite, Nth: 1 + c.rng.IntN(30), Fault: vfs.Torn})
	}
	rec, err := Recover(faulty, testDir, c.after, Proof{Lineage: c.lineage}, onlyCommits(c.recovered))
	if err != nil {
		if errors.Is(err, ErrCorrupt) || errors.Is(err, errWrongBody) {
			return err
		}
		return nil // the run ended in recovery
	}
	if rec.Last < c.acked {
		return fmt.Errorf("the log ends at %d", rec.Last)
	}
	c.acked = rec.Last
	opts := testOptions2(faulty)
	opts.Lineage = c.lineage
	a, err := startLog(opts, rec)
	if err != nil {
		return nil //nolint:nilerr // the run ended in its start, which is allowed
	}
	_ = c.work(a, rec.Next(), 5+c.rng.IntN(60))
	if c.rng.IntN(3) > 0 {
		faulty.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpSync | vfs.OpSyncData | vfs.OpRename | vfs.OpRemove | vfs.OpCreate | vfs.OpTruncate}) // killed
	}
	_ = a.log.Close()
	return c.twice
}

var errWrongBody = errors.New("another body than was written")

func (c *chained) recovered(e keys.Epoch, body []byte) error {
	if tag, whole := isBody(body); !whole || tag != tagOf(c.seen[e], e) {
		return fmt.Errorf("epoch %d: %w", e, errWrongBody)
	}
	return nil
}
