package storm

import (
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/epochkv/epochkv/internal/config"
)

// Attacks that send the largest batches for some time, each client one after the other. What is left of a batch, in memtables, in buffers of the log, in
// the archiver, or in a drill, meets what comes after it: sent once, they show none of that.

// TestRepeatedBatchesStayInTheBound: batches of few large values from several clients, again and again, also beside the archiver and beside drills.
//
//	go test ./internal/e2e/storm -run RepeatedBatches -v -storm.attacks
func TestRepeatedBatchesStayInTheBound(t *testing.T) {
	binary := mustBuild(t)
	for _, arm := range []struct {
		name            string
		archive, drills bool
	}{
		{name: "repeated batches of large values"},
		{name: "repeated batches beside an archive", archive: true},
		{name: "repeated batches beside drills", archive: true, drills: true},
	} {
		t.Run(arm.name, func(t *testing.T) {
			var options []string
			c := config.Default()
			if arm.archive {
				c.Archive.URL = filepath.Join(mustDir(t), "archive")
				options = append(options, "--archive", c.Archive.URL, "--archive-interval", "200ms")
			}
			if arm.drills {
				c.Archive.Drill, c.Archive.DrillDir = 2*time.Second, mustDir(t)
				options = append(options, "--restore-drill", c.Archive.Drill.String(), "--restore-drill-dir", c.Archive.DrillDir)
			}
			attack{arm.name, func(a *attacker) {
				a.bound = boundWithArchive(attackMemory, c.Archive)
				a.repeatBatches()
			}}.against(t, binary, options...)
		})
	}
}

// boundWithArchive is boundOf for a server that has an archive, too.
func boundWithArchive(memory config.Size, archive config.Archive) int64 {
	c := config.Default()
	c.Memory, c.Archive = memory, archive
	return int64(c.MemoryBound() - c.WatchMemory() - c.TransactionMemory() - c.LeaseMemory())
}

// repeatBatches sends batches of few large values from each of 12 clients for some time, and until one was written. A client whose batch is refused
// waits a little.
func (a *attacker) repeatBatches() {
	const clients = 12
	batch := encodedBatch(4, 15<<20)
	end := time.Now().Add(time.Duration(a.times(1, 25)) * time.Second)
	var all sync.WaitGroup
	for range clients {
		conn := a.dial(grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encoded{})))
		all.Go(func() {
			for (time.Now().Before(end) || a.done.Load() == 0) && a.ctx.Err() == nil {
				var none []byte
				err := conn.Invoke(a.ctx, "/epochkv.v1.KVService/BatchWrite", &batch, &none)
				a.count("a batch", err)
				if status.Code(err) != codes.OK {
					time.Sleep(10 * time.Millisecond)
				}
			}
		})
	}
	all.Wait()
	if a.done.Load() == 0 {
		a.Error("no batch was written")
	}
}
