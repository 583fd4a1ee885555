package sim

import (
	"fmt"
	"sync"
	"time"
)

// Status is how a transaction ended.
type Status uint8

// Statuses.
const (
	Aborted   Status = iota // certainly left no trace
	Committed               // acknowledged
	Unknown                 // the answer to its commit never came
)

func (s Status) String() string { return [...]string{"aborted", "committed", "unknown"}[s] }

// OpKind is what a step of a transaction does.
type OpKind uint8

// Kinds of steps.
const (
	Read   OpKind = iota // the list at Key
	Append               // Number to the list at Key
	Scan                 // the lists of all keys that begin with Key
)

// Op is one step of a transaction, and after it was done what it saw.
type Op struct {
	Kind   OpKind
	Key    string
	Number int              // Append
	List   []int            // Read
	Lists  map[string][]int // Scan: those that are there
}

func (o Op) String() string {
	switch o.Kind {
	case Append:
		return fmt.Sprintf("append %s %d", o.Key, o.Number)
	case Scan:
		return fmt.Sprintf("scan %s %v", o.Key, o.Lists)
	}
	return fmt.Sprintf("read %s %v", o.Key, o.List)
}

// Txn is one transaction of a history.
type Txn struct {
	Client       int
	Ops          []Op
	Status       Status
	Call, Return time.Duration
}

func (t *Txn) String() string {
	return fmt.Sprintf("client %d, %v, [%v, %v]: %v", t.Client, t.Status, t.Call, t.Return, t.Ops)
}

// History collects the transactions of many clients.
type History struct {
	started time.Time

	mu   sync.Mutex
	txns []*Txn
}

// NewHistory starts the clock.
func NewHistory() *History { return &History{started: time.Now()} }

// Now is the time of the history's clock.
func (h *History) Now() time.Duration { return time.Since(h.started) }

// Add adds a transaction that has ended. An unknown one may take effect at any time after its call.
func (h *History) Add(t *Txn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.txns = append(h.txns, t)
}

// Transactions are all that were added.
func (h *History) Transactions() []*Txn {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.txns
}

// Count is the number of transactions with a status.
func (h *History) Count(s Status) int {
	n := 0
	for _, t := range h.Transactions() {
		if t.Status == s {
			n++
		}
	}
	return n
}
