package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestKilledServerStartsWithAFlippedBitInASuperblock kills the real server under load, flips one
// bit in page 0 or 1 of its data file, and starts it again: it serves everything that it
// acknowledged, and reports what it repaired.
func TestKilledServerStartsWithAFlippedBitInASuperblock(t *testing.T) {
	rounds := 10
	if testing.Short() {
		rounds = 2
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	binary, dir := mustBuild(t), t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	batches, piped := newLedger("batch"), newLedger("pipe")
	for round := range rounds + 1 {
		p := mustRun(t, binary, dir, "--memory", "256MiB", "--memtable-size", "1MiB", "--segment-size", "256KiB", "--page-size", "4KiB")
		conn := mustDial(t, p.address)
		kv := pb.NewKVServiceClient(conn)
		for _, l := range []*ledger{batches, piped} {
			if err := l.check(ctx, kv, l == batches); err != nil {
				t.Fatalf("after %d kills: %v", round, err)
			}
		}
		status, err := pb.NewAdminServiceClient(conn).Status(ctx, &pb.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if repaired := status.GetRecovery().GetRepaired(); round > 0 && len(repaired) == 0 {
			t.Errorf("after %d kills the start repaired nothing", round)
		}
		if round < rounds {
			var workers sync.WaitGroup
			for i, work := range []func(context.Context, pb.KVServiceClient, *rand.Rand){batches.writeBatches, piped.pipeline} {
				mine := rand.New(rand.NewPCG(seed, uint64(100*round+i+1)))
				workers.Go(func() { work(ctx, kv, mine) })
			}
			for range 3 {
				time.Sleep(100 * time.Millisecond)
				if _, err := pb.NewAdminServiceClient(conn).Checkpoint(ctx, &pb.CheckpointRequest{}); err != nil {
					t.Error(err)
				}
			}
			time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond)
			p.kill(t)
			workers.Wait()
			if err := flipBit(filepath.Join(dir, "data.ekv"), int64(round%2*4096+rng.IntN(512)), rng.IntN(8)); err != nil {
				t.Fatal(err)
			}
		} else {
			p.kill(t)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}

func flipBit(name string, at int64, bit int) error {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		return fmt.Errorf("%w, closing: %w", err, f.Close())
	}
	b[0] ^= 1 << bit
	if _, err := f.WriteAt(b[:], at); err != nil {
		return fmt.Errorf("%w, closing: %w", err, f.Close())
	}
	return f.Close()
}
