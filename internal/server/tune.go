package server

import (
	"context"
	"log/slog"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/config"
)

// The heap may grow to a multiple of its live size before it is collected. The live heap is small (5
// to 15 MB, because the data is off-heap), so the multiple decides what the server takes in addition
// to its budget, and how often it collects. It grows with the budget. With 1 GiB, under batches of
// 100 keys, the collector takes 1 % of the processor time at 1600 and at 800, and 2 to 3 % at 400;
// resident memory is then 1088, 1020 and 940 MiB.
const (
	gcPercentPerGiB = 800
	gcPercentMin    = 200
	gcPercentMax    = 1600
	// heapBytesMin is the limit with the smallest budgets. Under ordinary loads 64 MiB took 138 MiB
	// of resident memory with --memory 64MiB, and 40 MiB take 113, for no processor time that could be
	// measured. Less than that would be too near to the live heap.
	heapBytesMin = 40 << 20
)

// heapGrowth is the value for GOGC.
func heapGrowth(memory config.Size) int {
	return int(min(max(memory*gcPercentPerGiB/config.GiB, gcPercentMin), gcPercentMax))
}

// tuneRuntime configures the garbage collector of Go from the memory budget. GOGC and GOMEMLIMIT
// have precedence if the operator has set them.
//
// GOMAXPROCS stays the number of processors. One more was measured on two processors, which the
// clients shared, twice or more at each point: batches of 100 and pipelines 0.8 to 1.35 times as
// fast, puts by 1 and 16 callers 0.93 to 0.95, and gets by 16 to 256 callers the same for 5 to 8 %
// more processor time.
func tuneRuntime(c *config.Config, log *slog.Logger) {
	percent := heapGrowth(c.Memory)
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(percent)
	}
	limit := heapLimit(c, 0)
	setHeapLimit(limit)
	log.Debug("garbage collector tuned", "percent", percent, "heap_limit", config.Size(limit).String())
}

// heapLimit is the size of the heap from which on the collector runs more often. The budget itself is off-heap. The heap may take a quarter of its
// size in addition, which is for large requests in flight, or 40 MiB and what is live, if that is more: one collection after the other would otherwise
// find nothing to free. Each get took six times the processor time while a transaction had 56 MB open with --memory 64MiB.
func heapLimit(c *config.Config, live int64) int64 { return max(int64(c.Memory)/4, heapBytesMin+live) }

// heapLimitBeside is heapLimit, or what is kept and heapGarbage, if that is more: what heapLive does not name stays for long, too, with its clients. A thousand
// idle transactions, or scans whose clients take nothing, half a message, or one large answer, made a get take four to fifteen times the processor time.
// This part ends where garbage beside it and the largest request would not be in the bound of resident memory.
func heapLimitBeside(c *config.Config, live, kept int64) int64 {
	return max(heapLimit(c, live), min(kept+heapGarbage, int64(c.HeapKept())+live))
}

// heapGarbage is how much garbage there is at least between two collections.
const heapGarbage = 8 << 20

// heapLiveStep is by how much what is live must change before the limit does: with small transactions it stays.
const heapLiveStep = 4 << 20

// heapLive is how much of the heap is live for long: the table of large values, open transactions, leases, users, the file that the archive does not
// have yet and, once there was a watch, commits, queues, responses and watches. Requests and answers are not in it. They are live for moments, and as much
// garbage beside them would not be in the bound of resident memory, which has terms for these two.
func (s *Server) heapLive() int64 {
	live := s.store.TableBytes() + s.transactions.memory.bytes.Load() + int64(s.leases.Count())*config.LeaseBytes + s.gate.users.HeapBytes()
	if s.feed.archive != nil {
		live += s.feed.archive.HeldBytes()
	}
	if s.feed.watched.Load() {
		live += int64(s.config.Feed.Memory) + watchResponsesBytes + s.feed.units.used.Load()*int64(config.WatchBytes)
	}
	return live
}

// followHeap changes the limit of the heap with what is live in it, until ctx ends.
func (s *Server) followHeap(ctx context.Context) {
	tick := time.NewTicker(heapInterval)
	defer tick.Stop()
	var kept heapKept
	for was := heapLimit(&s.config, 0); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		kept.note(heapTaken())
		live := s.heapLive() / heapLiveStep * heapLiveStep
		if limit := heapLimitBeside(&s.config, live, kept.often()/heapLiveStep*heapLiveStep); limit != was {
			setHeapLimit(limit)
			was = limit
		}
	}
}

// heapInterval is how long the collector may run too often.
const heapInterval = 250 * time.Millisecond

func setHeapLimit(bytes int64) {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(bytes)
	}
}

// residentBytes is the resident memory of the process, or zero if the kernel does not report it.
func residentBytes() uint64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	pages, err := strconv.ParseUint(fields[1], 10, 64)
	if err != nil {
		return 0
	}
	return pages * uint64(os.Getpagesize())
}
