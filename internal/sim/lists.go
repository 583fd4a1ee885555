package sim

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Level is the isolation level that a history must satisfy.
type Level uint8

// Levels.
const (
	// Snapshot forbids aborted, intermediate and fuzzy reads, lost updates, and every cycle of
	// dependencies with fewer than two anti-dependencies. Order in real time counts as a
	// dependency: a snapshot sees what was acknowledged before it.
	Snapshot Level = iota + 1
	// Strict forbids every cycle.
	Strict
)

// edgeKind is why one transaction comes before another.
type edgeKind uint8

const (
	writeWrite edgeKind = iota // it wrote the version before
	writeRead                  // it wrote what the other read
	readWrite                  // it read what the other overwrote
	realTime                   // it had ended when the other began
)

func (k edgeKind) String() string { return [...]string{"ww", "wr", "rw", "rt"}[k] }

type edge struct {
	to   int
	kind edgeKind
}

// graph has a node for each transaction, and after them one for each time at which one of them
// ended. Edges along these nodes represent the order in real time, which so costs an edge or two
// per transaction and not per pair.
type graph struct {
	txns  []*Txn
	edges [][]edge
}

// CheckLists checks a history of lists. It must end with reads of every key, after everything else.
// The error names the first anomaly, with its transactions.
func CheckLists(txns []*Txn, level Level) error {
	l := &listHistory{txns: txns, writers: map[string]map[int]int{}, orders: map[string][]int{}}
	if err := l.findWriters(); err != nil {
		return err
	}
	for i := range txns {
		if txns[i].Status != Committed {
			continue
		}
		if err := l.noteReads(i); err != nil {
			return fmt.Errorf("%w\n  in %v", err, txns[i])
		}
	}
	if err := l.checkReads(); err != nil {
		return err
	}
	g := l.graph()
	if level == Strict {
		return g.findCycle(func(edgeKind) bool { return true }, "a cycle")
	}
	noAnti := func(k edgeKind) bool { return k != readWrite }
	if err := g.findCycle(noAnti, "a cycle without anti-dependencies (G0 or G1c)"); err != nil {
		return err
	}
	return g.findSingle(noAnti)
}

// listHistory is a history with what is derived from it.
type listHistory struct {
	txns    []*Txn
	writers map[string]map[int]int // key, number: transaction
	orders  map[string][]int       // per key the longest list that was read
	reads   []listRead
}

// listRead is a list that a transaction saw, without its own appends.
type listRead struct {
	txn  int
	key  string
	list []int
}

func (l *listHistory) findWriters() error {
	for i, t := range l.txns {
		for _, o := range t.Ops {
			if o.Kind != Append {
				continue
			}
			if l.writers[o.Key] == nil {
				l.writers[o.Key] = map[int]int{}
			}
			if other, twice := l.writers[o.Key][o.Number]; twice {
				return fmt.Errorf("invalid history: %d was appended to %s by %v and %v", o.Number, o.Key, l.txns[other], t)
			}
			l.writers[o.Key][o.Number] = i
		}
	}
	return nil
}

// noteReads records the lists that a transaction saw, and checks that it saw its own appends and
// one snapshot.
func (l *listHistory) noteReads(i int) error {
	own, seen := map[string][]int{}, map[string][]int{}
	for _, o := range l.txns[i].Ops {
		switch o.Kind {
		case Append:
			own[o.Key] = append(own[o.Key], o.Number)
		case Read:
			if err := l.noteRead(i, o.Key, o.List, own, seen); err != nil {
				return err
			}
		case Scan:
			for _, key := range l.keysBeginning(o.Key) {
				if err := l.noteRead(i, key, o.Lists[key], own, seen); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// keysBeginning are all keys of the history with the prefix, which a scan should find: one that is
// missing was read as empty.
func (l *listHistory) keysBeginning(prefix string) []string {
	var found []string
	for _, key := range slices.Sorted(maps.Keys(l.writers)) {
		if strings.HasPrefix(key, prefix) {
			found = append(found, key)
		}
	}
	return found
}

func (l *listHistory) noteRead(i int, key string, list []int, own, seen map[string][]int) error {
	mine := own[key]
	if len(list) < len(mine) || !slices.Equal(list[len(list)-len(mine):], mine) {
		return fmt.Errorf("%s reads as %v without the own appends %v", key, list, mine)
	}
	list = list[:len(list)-len(mine)]
	if before, again := seen[key]; again {
		if !slices.Equal(before, list) {
			return fmt.Errorf("a fuzzy read: %s was %v and then %v", key, before, list)
		}
		return nil
	}
	seen[key] = list
	l.reads = append(l.reads, listRead{i, key, list})
	if len(list) > len(l.orders[key]) {
		l.orders[key] = list
	}
	return nil
}

// checkReads checks what needs no graph: one order per key, no reads of what did not happen, and no
// lost update.
func (l *listHistory) checkReads() error {
	for _, r := range l.reads {
		if order := l.orders[r.key]; !slices.Equal(order[:len(r.list)], r.list) {
			return fmt.Errorf("%s has two orders: %v and %v, the latter seen by %v", r.key, order, r.list, l.txns[r.txn])
		}
		if err := l.checkRead(r); err != nil {
			return fmt.Errorf("%w\n  seen by %v", err, l.txns[r.txn])
		}
	}
	happened := map[int]bool{} // of the unknown ones, those that were seen
	for _, r := range l.reads {
		for _, number := range r.list {
			happened[l.writers[r.key][number]] = true
		}
	}
	for key, writers := range l.writers {
		order := l.orders[key]
		for number, i := range writers {
			if (l.txns[i].Status == Committed || happened[i]) && !slices.Contains(order, number) {
				return fmt.Errorf("a lost update: %d is missing in %s %v\n  appended by %v", number, key, order, l.txns[i])
			}
		}
	}
	return nil
}

func (l *listHistory) checkRead(r listRead) error {
	for at, number := range r.list {
		i, ok := l.writers[r.key][number]
		switch {
		case !ok:
			return fmt.Errorf("%s has %d, which no transaction appended", r.key, number)
		case l.txns[i].Status == Aborted:
			return fmt.Errorf("an aborted read (G1a): %s has %d of %v", r.key, number, l.txns[i])
		case slices.Contains(r.list[:at], number):
			return fmt.Errorf("%s has %d twice", r.key, number)
		}
	}
	if n := len(r.list); n > 0 {
		last := r.list[n-1]
		if i := l.writers[r.key][last]; i != r.txn && l.lastAppend(i, r.key) != last {
			return fmt.Errorf("an intermediate read (G1b): %s ends with %d of %v", r.key, last, l.txns[i])
		}
	}
	return nil
}

func (l *listHistory) lastAppend(i int, key string) int {
	last := 0
	for _, o := range l.txns[i].Ops {
		if o.Kind == Append && o.Key == key {
			last = o.Number
		}
	}
	return last
}

func (l *listHistory) graph() *graph {
	g := &graph{txns: l.txns, edges: make([][]edge, len(l.txns))}
	for key, order := range l.orders {
		for i := 1; i < len(order); i++ {
			g.add(l.writers[key][order[i-1]], l.writers[key][order[i]], writeWrite)
		}
	}
	for _, r := range l.reads {
		if n := len(r.list); n > 0 {
			g.add(l.writers[r.key][r.list[n-1]], r.txn, writeRead)
		}
		if order := l.orders[r.key]; len(order) > len(r.list) {
			g.add(r.txn, l.writers[r.key][order[len(r.list)]], readWrite)
		}
	}
	g.addTime()
	return g
}

func (g *graph) add(from, to int, kind edgeKind) {
	if from != to {
		g.edges[from] = append(g.edges[from], edge{to, kind})
	}
}

// addTime adds the ends of transactions as a chain of nodes.
func (g *graph) addTime() {
	var ended []int
	for i, t := range g.txns {
		if t.Status == Committed {
			ended = append(ended, i)
		}
	}
	slices.SortFunc(ended, func(a, b int) int { return int(g.txns[a].Return - g.txns[b].Return) })
	first := len(g.txns)
	g.edges = append(g.edges, make([][]edge, len(ended))...)
	for n, i := range ended {
		g.add(i, first+n, realTime)
		if n > 0 {
			g.add(first+n-1, first+n, realTime)
		}
	}
	for i, t := range g.txns {
		if t.Status == Aborted {
			continue
		}
		// The ends before its call.
		n, _ := slices.BinarySearchFunc(ended, t, func(e int, t *Txn) int {
			if g.txns[e].Return < t.Call {
				return -1
			}
			return 1
		})
		if n > 0 {
			g.add(first+n-1, i, realTime)
		}
	}
}

// findCycle looks for a cycle of edges that follow allows.
func (g *graph) findCycle(follow func(edgeKind) bool, what string) error {
	const white, grey, black = 0, 1, 2
	color := make([]uint8, len(g.edges))
	type frame struct{ node, next int }
	for root := range g.edges {
		if color[root] != white {
			continue
		}
		stack := []frame{{node: root}}
		color[root] = grey
		for len(stack) > 0 {
			top := &stack[len(stack)-1]
			if top.next == len(g.edges[top.node]) {
				color[top.node] = black
				stack = stack[:len(stack)-1]
				continue
			}
			e := g.edges[top.node][top.next]
			top.next++
			switch {
			case !follow(e.kind) || color[e.to] == black:
			case color[e.to] == grey:
				return g.describe(g.path(e.to, top.node, follow), e, what)
			default:
				color[e.to] = grey
				stack = append(stack, frame{node: e.to})
			}
		}
	}
	return nil
}

// findSingle looks for a cycle with exactly one anti-dependency (G-single).
func (g *graph) findSingle(follow func(edgeKind) bool) error {
	for from := range g.txns {
		for _, e := range g.edges[from] {
			if e.kind != readWrite {
				continue
			}
			if path := g.path(e.to, from, follow); path != nil {
				return g.describe(path, edge{e.to, readWrite}, "a cycle with one anti-dependency (G-single)")
			}
		}
	}
	return nil
}

// step is a node of a path and the edge by which it was reached.
type step struct {
	node int
	kind edgeKind
}

// path is a shortest path, or nil.
func (g *graph) path(from, to int, follow func(edgeKind) bool) []step {
	before := map[int]step{from: {node: -1}}
	for queue := []int{from}; len(queue) > 0; queue = queue[1:] {
		node := queue[0]
		if node == to {
			var path []step
			for ; node != -1; node = before[node].node {
				path = append(path, step{node, before[node].kind})
			}
			slices.Reverse(path)
			return path
		}
		for _, e := range g.edges[node] {
			if _, seen := before[e.to]; !seen && follow(e.kind) {
				before[e.to] = step{node, e.kind}
				queue = append(queue, e.to)
			}
		}
	}
	return nil
}

func (g *graph) describe(path []step, last edge, what string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:", what)
	for n, s := range path {
		if s.node >= len(g.txns) {
			continue // the end of a transaction
		}
		kind := s.kind
		if n == 0 {
			kind = last.kind
		}
		fmt.Fprintf(&b, "\n  -%v-> %v", kind, g.txns[s.node])
	}
	return errors.New(b.String())
}
