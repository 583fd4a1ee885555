// Package health keeps the list of conditions: operational problems of a server that are active.
//
//	observers ──► Update(now, found) ──► List ──► log (begin, repeat, end)
//	                                         └──► Snapshot: /healthz, /readyz, grpc.health.v1, Status, metrics
//
// Terms. A condition has a name that never changes (it is a metric label, and runbooks refer to
// it), a severity, one constant sentence, and a cause that may change while the condition is
// active. Warning means that no request is refused yet. Degraded means that some requests fail, or
// will fail soon, and that a restart would not help. Unavailable means that health checks must
// fail: the server does not keep what it promises to clients.
//
// Invariants: a server has one List, and every health interface reads it; a condition that an
// Update does not find has ended; names are a fixed set, so that the number of metric series is
// bounded.
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
	Warning     Severity = iota + 1 // no request is refused yet
	Degraded                        // some requests fail or will fail soon
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

// Condition is an operational problem that is active.
type Condition struct {
	Name     string // kebab-case, stable
	Severity Severity
	Message  string // one constant sentence: what is wrong, and what it means for requests
	Cause    string // current details: an error, an amount; may be empty, may change
	Since    time.Time
}

// Text is the message with its cause.
func (c *Condition) Text() string {
	if c.Cause == "" {
		return c.Message
	}
	return c.Message + ": " + c.Cause
}

// repeatEvery is how often an active condition is logged again.
const repeatEvery = 10 * time.Minute

// List has the conditions of a server. It may be used by several goroutines.
type List struct {
	log *slog.Logger

	mu       sync.Mutex
	active   map[string]*entry // by name
	observed time.Time         // of the last Update
}

type entry struct {
	Condition
	logged time.Time
}

// NewList is an empty list that logs to log.
func NewList(log *slog.Logger) *List { return &List{log: log, active: map[string]*entry{}} }

// Update replaces the list by the conditions that an observation at now found. A condition that was
// on the list keeps its start time. Since of the argument is ignored. An observation that is older
// than the last one is dropped.
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
		l.begin(now, c)
	}
	for name, e := range l.active {
		if !current[name] {
			delete(l.active, name)
			l.log.Info("ended: "+e.Message, "condition", name, "lasted", now.Sub(e.Since).Round(time.Millisecond))
		}
	}
}

// begin adds a condition to the list, or updates it, and logs it when it is new, worse or due
// again.
func (l *List) begin(now time.Time, c Condition) {
	e := l.active[c.Name]
	if e == nil {
		e = &entry{Condition: Condition{Since: now}}
		l.active[c.Name] = e
	}
	worse := c.Severity > e.Severity && e.Severity != 0
	c.Since = e.Since
	e.Condition = c
	if worse || now.Sub(e.logged) >= repeatEvery {
		e.logged = now
		l.log.Log(context.Background(), c.Severity.level(), c.Message, "condition", c.Name, "cause", c.Cause)
	}
}

// Snapshot is a copy of the list: the most severe first, then by name.
func (l *List) Snapshot() []Condition {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Condition, 0, len(l.active))
	for _, e := range l.active {
		out = append(out, e.Condition)
	}
	slices.SortFunc(out, func(a, b Condition) int {
		return cmp.Or(cmp.Compare(b.Severity, a.Severity), cmp.Compare(a.Name, b.Name))
	})
	return out
}
