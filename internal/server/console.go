package server

import (
	"net/http"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/console"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// consoleState is what the console needs. It is constant after Open.
type consoleState struct {
	methods inProcess
	samples *console.Samples // nil without a console

	turns turnLine // for what computes; see computing
}

// newConsole makes the handler of the console, or nil if there is none.
func (s *Server) newConsole() http.Handler {
	if s.config.Console == config.ConsoleOff {
		return nil
	}
	s.endpoints.console.samples = console.NewSamples(s.consoleCounters)
	return s.untilTaken(console.Handler(console.Options{
		Call: s.callForConsole, Samples: s.endpoints.console.samples, Checked: s.usersAreChecked,
		Changes: s.config.Console == config.ConsoleFull,
	}))
}

// usersAreChecked reports whether requests need rights.
func (s *Server) usersAreChecked() bool { return s.gate.table.Load() != nil }

// consoleReads and consoleWrites are the requests whose rates and latencies the console shows.
var (
	consoleReads  = []telemetry.Method{telemetry.MethodGet, telemetry.MethodBatchGet}
	consoleWrites = []telemetry.Method{
		telemetry.MethodPut, telemetry.MethodDelete, telemetry.MethodBatchWrite, telemetry.MethodDeleteRange,
		telemetry.MethodInvoke, telemetry.MethodInvokeAll, telemetry.MethodExecute, telemetry.MethodCommit,
	}
)

func (s *Server) consoleCounters() console.Counters {
	reads, writes := s.observer.requests.Totals(consoleReads...), s.observer.requests.Totals(consoleWrites...)
	e := s.store.Stats()
	st, a := &e.Storage, s.activityWithoutMethods(&e)
	return console.Counters{
		Reads: reads.Count, Writes: writes.Count, Failed: reads.Failed + writes.Failed,
		ReadLatency: reads.Latency, WriteLatency: writes.Latency,
		Commits: a.Commits, Syncs: a.Syncs, LogBytes: a.LogBytes,
		CacheHits: a.CacheHits, CacheMisses: a.CacheMisses,
		StallNanos: uint64(st.Backpressure.StallTime),
		MemoryUsed: uint64(st.Memory.CacheUsed + st.Memory.Memtables), LiveBytes: int64(st.Pages.Live) * int64(st.PageSize), DiskFree: st.Disk.Free,
		Connections: int(s.connections.open.Load()), Transactions: int(a.Transactions),
		Watches: int(a.Watches), Snapshots: e.Snapshots.Snapshots,
	}
}
