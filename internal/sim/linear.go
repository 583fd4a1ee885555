package sim

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// CheckLinear asks porcupine whether there is one order of the transactions, in which each takes
// effect between its call and its return, that explains everything that was read. Its state is all
// the lists, so histories must be short.
func CheckLinear(txns []*Txn, timeout time.Duration) error {
	var operations []porcupine.Operation
	for _, t := range txns {
		if t.Status == Aborted {
			continue
		}
		end := int64(t.Return)
		if t.Status == Unknown {
			end = math.MaxInt64 // at any time, or, after everything else, without effect
		}
		operations = append(operations, porcupine.Operation{ClientId: t.Client, Input: t, Call: int64(t.Call), Return: end})
	}
	model := porcupine.Model{
		Init: func() any { return lists{} },
		Step: func(state, input, _ any) (bool, any) { return state.(lists).apply(input.(*Txn)) },
		Equal: func(a, b any) bool {
			return maps.Equal(a.(lists), b.(lists))
		},
		DescribeOperation: func(input, _ any) string { return fmt.Sprint(input) },
	}
	switch porcupine.CheckOperationsTimeout(model, operations, timeout) {
	case porcupine.Illegal:
		var b strings.Builder
		for _, t := range txns {
			fmt.Fprintf(&b, "\n  %v", t)
		}
		return fmt.Errorf("no order explains this history:%s", b.String())
	case porcupine.Unknown:
		return fmt.Errorf("porcupine found no answer about %d transactions in %v", len(operations), timeout)
	}
	return nil
}

// lists is a state: per key the list as text.
type lists map[string]string

// apply returns whether a transaction fits the state, and the state after it. The reads of an
// unknown transaction were never reported, so they may not fit: then it did not happen.
func (s lists) apply(t *Txn) (bool, any) {
	after := maps.Clone(s)
	for _, o := range t.Ops {
		fits := true
		switch o.Kind {
		case Append:
			after[o.Key] += fmt.Sprint(o.Number, ",")
		case Read:
			fits = after[o.Key] == joinList(o.List)
		case Scan:
			fits = after.fits(o)
		}
		if !fits {
			return t.Status == Unknown, s
		}
	}
	return true, after
}

func (s lists) fits(scan Op) bool {
	for key, list := range s {
		if strings.HasPrefix(key, scan.Key) && list != joinList(scan.Lists[key]) {
			return false
		}
	}
	for _, key := range slices.Collect(maps.Keys(scan.Lists)) {
		if s[key] != joinList(scan.Lists[key]) {
			return false
		}
	}
	return true
}

// joinList is a list as the store has it.
func joinList(list []int) string {
	var b strings.Builder
	for _, n := range list {
		fmt.Fprint(&b, n, ",")
	}
	return b.String()
}
