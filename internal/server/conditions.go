package server

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	storeclock "github.com/epochkv/epochkv/internal/clock"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
)

const (
	// healthInterval is the time after which a condition shows in grpc.health.v1 at the latest.
	// /healthz, /readyz and Status observe the store for each request.
	healthInterval = 250 * time.Millisecond
	// countersInterval is how often the engine's counters are compared with the ones before.
	countersInterval = time.Second
	// oldSnapshot is the age from which a snapshot is a condition: the versions that it needs can
	// be neither pruned nor dropped.
	oldSnapshot = 10 * time.Minute
)

// healthConditions observes the store and has the list of active conditions. Every report of health
// uses it.
type healthConditions struct {
	list  *health.List
	probe probe
	ended endedHolders // guarded by mu

	mu       sync.Mutex
	counted  []health.Condition // result of the last comparison of counters
	counters mvcc.Stats         // of the last comparison
}

// countedConditions are the conditions that need a comparison of two snapshots of the engine's
// counters, or an expensive observation.
func countedConditions(before, now *mvcc.Stats) (found []health.Condition) {
	add := func(name string, severity health.Severity, message, cause string) {
		found = append(found, health.Condition{Name: name, Severity: severity, Message: message, Cause: cause})
	}
	st := &now.Storage
	if n := st.Backpressure.Refused - before.Storage.Backpressure.Refused; n > 0 {
		add("memory-full", health.Degraded, "writes are refused because memory is full", fmt.Sprintf("%d in the last second", n))
	}
	if waited := st.Backpressure.StallTime - before.Storage.Backpressure.StallTime; waited > 0 {
		add("writes-stalled", health.Warning, "writes wait for a checkpoint to make room", fmt.Sprintf("waited %v in the last second", waited))
	}
	// A checkpoint may need as much space as it merges before it can free any.
	if free := st.Disk.Free; free >= 0 && free < st.Memory.Budget {
		add("disk-low", health.Warning, "the disk is nearly full", fmt.Sprintf("%d bytes free below %s", free, st.Dir))
	}
	if err := st.Log.Preparing; err != nil {
		add("log-segment", health.Warning, "log segments cannot be prepared or removed; writes stop when the prepared ones are used up, and go on by themselves", err.Error())
	}
	if n := st.Damage.Incomplete; n > 0 {
		add("start-incomplete", health.Degraded, "the device failed reads while the server started: large values that are intact may answer DATA_LOSS until the server is restarted and the device can read them",
			fmt.Sprintf("%d tables were rebuilt from what could be read; the log of the start has them", n))
	}
	if n := st.Blobs.Unfreed; n > 0 {
		add("values-not-freed", health.Warning, "large values that were overwritten or deleted keep their space, because their pages cannot be read; checkpoints try again",
			fmt.Sprintf("%d values", n))
	}
	if q := &st.Quarantine; q.Versions > 0 {
		add("entries-quarantined", health.Warning, "the tree refuses entries, which are kept beside it; kvctl verify lists them, and deleting or overwriting their keys ends it",
			fmt.Sprintf("%d versions, %d bytes, first %s", q.Versions, q.Bytes, q.Reason))
	}
	if lag := now.Expiry.Lag; lag > expiryLagMax {
		add("expiry-lagging", health.Warning, "keys are deleted later than a second after their deadlines",
			fmt.Sprintf("the earliest deadline was %v ago; last error: %v", lag.Round(time.Second), now.Expiry.Err))
	}
	if damage := now.Expiry.Damage; damage != nil {
		add("expiry-damaged", health.Warning, "damaged pages hide deadlines, or keys that are due: these keys stay until they are written again; all others expire", damage.Error())
	}
	if d := now.ClockDifference; d.Abs() > storeclock.DifferenceMax {
		add("clock-differs", health.Warning, "the store's clock differs from the system's and is corrected slowly; kvctl clock accept adopts a system time that is later and right",
			fmt.Sprintf("the system's time minus the store's is %v", d.Round(time.Second)))
	}
	if age := now.Snapshots.OldestAge; age > oldSnapshot {
		add("old-snapshot", health.Warning, "an old snapshot keeps old versions; kvctl snapshots list shows what does, and kvctl snapshots end ends it", fmt.Sprintf("held for %v", age.Round(time.Second)))
	}
	return found
}

// errorConditions are the conditions that the store's own errors show. They cost a few atomic
// loads.
func errorConditions(failed, full, checkpoint, damage error) (found []health.Condition) {
	add := func(name string, severity health.Severity, message string, err error) {
		if err != nil {
			found = append(found, health.Condition{Name: name, Severity: severity, Message: message, Cause: err.Error()})
		}
	}
	add("store-failed", health.Unavailable, "the store accepts no more writes; cure the cause and restart", failed)
	add("disk-full", health.Degraded, "the disk is full: writes are refused; reads and deletions are served", full)
	add("checkpoints-failing", health.Degraded, "checkpoints fail and are tried again; until then what is written takes memory", checkpoint)
	add("data-damaged", health.Degraded, "checkpoints have met damage; its keys answer DATA_LOSS, but for what was written since", damage)
	return found
}

// observe brings the list up to date and returns it, the worst first.
func (s *Server) observe() []health.Condition {
	c := &s.conditions
	c.mu.Lock()
	defer c.mu.Unlock()
	found := errorConditions(s.store.Err(), s.store.DiskFull(), s.store.CheckpointErr(), s.store.Damage())
	now := time.Now()
	found = append(found, s.conditions.probe.conditions(now, s.config.ProbeTimeout)...)
	found = append(found, s.observer.audit.conditions()...)
	c.list.Update(now, append(found, c.counted...))
	return c.list.Snapshot()
}

// compareCounters updates the conditions that need a comparison of counters.
func (s *Server) compareCounters() {
	now, c := s.store.Stats(), &s.conditions
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counted = append(countedConditions(&c.counters, &now), leaseConditions(s.leases.Stats(), s.leases.Damage())...)
	c.counted = append(c.counted, s.feed.conditions()...)
	c.counted = append(c.counted, s.feed.archiveConditions(time.Now())...)
	c.counted = append(c.counted, s.snapshots.backups.conditions(time.Now(), s.config.BackupMaxAge)...)
	c.counted = append(c.counted, s.endpoints.tls.conditions(time.Now())...)
	c.counters = now
	s.logEnds()
}

// leaseLagMax is the lag of the expiry of leases from which on it is a condition.
const leaseLagMax = 5 * time.Second

// leaseConditions are the conditions that leases end late, or cannot end because of damage.
func leaseConditions(now lease.Stats, damage lease.Damage) (found []health.Condition) {
	if now.Lag >= leaseLagMax {
		found = append(found, health.Condition{
			Name: "leases-lagging", Severity: health.Warning,
			Message: "leases end late: their keys and locks stay until the server can delete them",
			Cause:   fmt.Sprintf("a deadline passed %v ago; %d attempts have failed since the start", now.Lag.Round(time.Second), now.Failures),
		})
	}
	if damage.Err != nil {
		found = append(found, health.Condition{
			Name: "leases-damaged", Severity: health.Warning,
			Message: "damaged pages hide leases, or keys of leases that have ended: they stay; kvctl lease revoke ends a lease that is hidden, and writing a key again detaches it",
			Cause:   fmt.Sprintf("%d leases cannot end; hidden ones with keys: %v; %v", damage.Stuck, damage.Hidden, damage.Err),
		})
	}
	return found
}

// watchConditions logs conditions, and shows them in grpc.health.v1, until ctx ends.
func (s *Server) watchConditions(ctx context.Context) {
	quick, slow := time.NewTicker(healthInterval), time.NewTicker(countersInterval)
	defer quick.Stop()
	defer slow.Stop()
	serving := true
	for {
		select {
		case <-ctx.Done():
			return
		case <-slow.C:
			s.compareCounters()
		case <-quick.C:
		}
		if now := unavailable(s.observe()) == nil; now != serving {
			serving = now
			s.setHealth(servingStatus(serving)) // without effect once the server drains
		}
	}
}

func servingStatus(serving bool) healthpb.HealthCheckResponse_ServingStatus {
	if serving {
		return healthpb.HealthCheckResponse_SERVING
	}
	return healthpb.HealthCheckResponse_NOT_SERVING
}

// unavailableError is the reason for which health checks fail.
type unavailableError struct{ condition health.Condition }

func (e *unavailableError) Error() string { return e.condition.Text() }

// unavailable is nil unless a condition makes health checks fail.
func unavailable(found []health.Condition) error {
	if len(found) > 0 && found[0].Severity == health.Unavailable {
		return &unavailableError{found[0]}
	}
	return nil
}

// healthMessage is the part of Status about conditions.
func (s *Server) healthMessage() *pb.Health {
	found := s.observe()
	out := &pb.Health{State: pb.Health_STATE_SERVING}
	switch {
	case s.store.Err() != nil:
		out.State = pb.Health_STATE_READ_ONLY
	case s.drain.active.Load():
		out.State = pb.Health_STATE_DRAINING
	case unavailable(found) != nil:
		out.State = pb.Health_STATE_UNAVAILABLE
	}
	var causes []string
	for _, c := range found {
		out.Conditions = append(out.Conditions, &pb.Condition{
			Name: c.Name, Severity: severityMessage(c.Severity), Message: c.Message, Cause: c.Cause, Since: timestamppb.New(c.Since),
		})
		if c.Severity > health.Warning {
			causes = append(causes, c.Text())
		}
	}
	if out.State == pb.Health_STATE_DRAINING {
		causes = append(causes, errShuttingDown.Error())
	}
	out.Cause = strings.Join(causes, "; ")
	return out
}

func severityMessage(s health.Severity) pb.Condition_Severity {
	switch s {
	case health.Warning:
		return pb.Condition_SEVERITY_WARNING
	case health.Degraded:
		return pb.Condition_SEVERITY_DEGRADED
	case health.Unavailable:
		return pb.Condition_SEVERITY_UNAVAILABLE
	}
	return pb.Condition_SEVERITY_UNSPECIFIED
}

// logRebuild logs what became of an inner node of the tree that could not be read.
func logRebuild(log *slog.Logger, r *storage.Rebuild) {
	if r.Children == 0 {
		log.Error("a damaged inner node cannot be rebuilt: its keys answer DATA_LOSS, but for what is written from now on",
			"page", r.Page, "offset", r.Offset, "level", r.Level, "reason", r.Reason)
		return
	}
	log.Warn("a damaged inner node was rebuilt from the pages below it", "page", r.Page, "offset", r.Offset, "level", r.Level,
		"children", r.Children, "first_key", fmt.Sprintf("%.80q", r.KeyLower))
}
