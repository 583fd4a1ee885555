// Package health keeps the list of conditions: what an operator should know about a server while it lasts.
//
//	observers ──► Update(now, found) ──► List ──► log (begin, repeat, end)
//	                                         └──► Snapshot: /healthz, /readyz, grpc.health.v1, Status, metrics
//
// Terms. A condition has a name that never changes (it is a metric label and what runbooks refer to), a severity, one constant sentence,
// and a cause that may change while the condition lasts. Warning means that nothing is refused yet. Degraded means that some requests fail,
// or soon will, and that a restart would not help. Unavailable means that health checks must fail: what the server promises
// to clients is not being kept.
//
// Invariants: there is one List in a server, and every way to ask for health reads it; a condition that is not found by an
// Update is over; names are a fixed set, so that the number of metric series is bounded.
//
// The package observes nothing itself, starts no goroutine, and decides no status code.
package health

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// Severity orders conditions.
type Severity int

// Severities.
const (
	Warning     Severity = iota + 1 // nothing is refused yet
	Degraded                        // some requests fail or soon will
	Unavailable                     // health checks fail
)

// String is the severity as metric labels and messages write it.
func (s Severity) String() string {
	switch s {
	case Warning:
		return "warning"
	case Degraded:
		return "degraded"
	case Unavailable:
		return "unavailable"
	}
	return "unknown"
}

func (s Severity) level() slog.Level {
	if s >= Degraded {
		return slog.LevelError
	}
	return slog.LevelWarn
}

// Condition is one thing that holds now.
type Condition struct {
	Name     string // kebab-case, stable
	Severity Severity
	Message  string // one sentence that never changes: what holds, and what it means for requests
	Cause    string // what is known about it now: an error, an amount; may be empty, may change
	Since    time.Time
}

// Text is the message with its cause.
func (c *Condition) Text() string {
	if c.Cause == "" {
		return c.Message
	}
	return c.Message + ": " + c.Cause
}

// repeatEvery is how often a condition that lasts is logged again.
const repeatEvery = 10 * time.Minute

// List holds the conditions of a server. It may be used by several goroutines.
type List struct {
	log *slog.Logger

	mu       sync.Mutex
	holding  map[string]*entry // by name
	observed time.Time         // of the last Update
}

type entry struct {
	Condition
	logged time.Time
}

// NewList is an empty list that logs to log.
func NewList(log *slog.Logger) *List { return &List{log: log, holding: map[string]*entry{}} }

// Update replaces the list by what an observation at now found. A condition that was on the list keeps the time since which it
// holds. Since of the argument is ignored. An observation older than the last one is dropped.
func (l *List) Update(now time.Time, found []Condition) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Before(l.observed) {
		return
	}
	l.observed = now
	current := make(map[string]bool, len(found))
	for _, c := range found {
		current[c.Name] = true
		l.hold(now, c)
	}
	for name, e := range l.holding {
		if !current[name] {
			delete(l.holding, name)
			l.log.Info("over: "+e.Message, "condition", name, "lasted", now.Sub(e.Since).Round(time.Millisecond))
		}
	}
}

func (l *List) hold(now time.Time, c Condition) {
	e := l.holding[c.Name]
	if e == nil {
		e = &entry{Condition: Condition{Since: now}}
		l.holding[c.Name] = e
	}
	worse := c.Severity > e.Severity && e.Severity != 0
	c.Since = e.Since
	e.Condition = c
	if worse || now.Sub(e.logged) >= repeatEvery {
		e.logged = now
		l.log.Log(context.Background(), c.Severity.level(), c.Message, "condition", c.Name, "cause", c.Cause)
	}
}

// Snapshot is a copy of the list: the worst first, then by name.
func (l *List) Snapshot() []Condition {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Condition, 0, len(l.holding))
	for _, e := range l.holding {
		out = append(out, e.Condition)
	}
	slices.SortFunc(out, func(a, b Condition) int {
		return cmp.Or(cmp.Compare(b.Severity, a.Severity), cmp.Compare(a.Name, b.Name))
	})
	return out
}
