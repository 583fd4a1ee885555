package server

import (
	"context"
	"log/slog"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"epochkv/internal/mvcc"
)

// condition is something that an operator should know while it lasts. It is logged when it begins, every conditionRepeat while it goes
// on, and when it is over.
type condition struct {
	level   slog.Level
	what    string // always the same words for the same condition
	details []any
}

const (
	conditionInterval = time.Second
	conditionRepeat   = 10 * time.Minute
	// oldSnapshot is the age at which a snapshot is worth a word: the versions that it holds can be neither pruned nor dropped.
	oldSnapshot = 10 * time.Minute
)

// conditionsOf are the conditions that hold now, told from the counters and those of the look before.
func conditionsOf(before, now *mvcc.Stats, damage error) (found []condition) {
	add := func(level slog.Level, what string, details ...any) {
		found = append(found, condition{level, what, details})
	}
	st := &now.Storage
	if err := now.CheckpointErr; err != nil {
		add(slog.LevelError, "checkpoints fail; writes go on until memory is full", "cause", err)
	}
	if damage != nil {
		add(slog.LevelError, "checkpoints have met damage; its keys answer DATA_LOSS, but for what was written since", "damage", damage)
	}
	if n := st.Refused - before.Storage.Refused; n > 0 {
		add(slog.LevelError, "writes are refused because memory is full", "since_last_look", n)
	}
	if waited := st.StallTime - before.Storage.StallTime; waited > 0 {
		add(slog.LevelWarn, "writes wait for a checkpoint to make room", "waited", waited)
	}
	// A checkpoint may need as much again as it merges before it can give anything back.
	if free := st.DiskFree; free >= 0 && free < st.MemoryBudget {
		add(slog.LevelWarn, "the disk is nearly full", "free_bytes", free, "dir", st.Dir)
	}
	if age := now.Snapshots.OldestAge; age > oldSnapshot {
		add(slog.LevelWarn, "an old snapshot keeps old versions; kvctl txn list shows transactions", "age", age.Round(time.Second))
	}
	return found
}

// conditionLog turns conditions that last into lines of a log.
type conditionLog struct {
	log   *slog.Logger
	lasts map[string]*lasting
}

type lasting struct{ since, told, seen time.Time }

// update tells what has begun, goes on, or is over at the time of a look.
func (c *conditionLog) update(now time.Time, found []condition) {
	for _, f := range found {
		l := c.lasts[f.what]
		if l == nil {
			l = &lasting{since: now}
			c.lasts[f.what] = l
		}
		l.seen = now
		if now.Sub(l.told) >= conditionRepeat {
			l.told = now
			c.log.Log(context.Background(), f.level, f.what, f.details...)
		}
	}
	for what, l := range c.lasts {
		if l.seen.Before(now) {
			delete(c.lasts, what)
			c.log.Info("over: "+what, "lasted", now.Sub(l.since).Round(time.Millisecond))
		}
	}
}

// watchConditions logs conditions, and shows in grpc.health.v1 that the store has failed, until ctx ends.
func (s *Server) watchConditions(ctx context.Context) {
	health, look := time.NewTicker(healthInterval), time.NewTicker(conditionInterval)
	defer health.Stop()
	defer look.Stop()
	log, before := conditionLog{log: s.log, lasts: map[string]*lasting{}}, s.store.Stats()
	for {
		select {
		case <-ctx.Done():
			return
		case <-health.C:
			if err := s.store.Err(); err != nil {
				s.log.Error("the store accepts no more writes; cure the cause and restart", "cause", err)
				s.setHealth(healthpb.HealthCheckResponse_NOT_SERVING)
				return
			}
		case at := <-look.C:
			now := s.store.Stats()
			log.update(at, conditionsOf(&before, &now, s.store.Damage()))
			before = now
		}
	}
}
