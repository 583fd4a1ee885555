package sim

import (
	"testing"
	"time"
)

// TestRegistersRefuseWrongHistories: one history of each kind that no store may give, and its neighbour that it may.
func TestRegistersRefuseWrongHistories(t *testing.T) {
	done := func(o RegisterOp, call, end time.Duration) *RegisterOp {
		o.Key, o.Status, o.Call, o.Return = "k", Committed, call, end
		return &o
	}
	saw := func(value string, epoch uint64) RegisterOp {
		return RegisterOp{Kind: Get, Seen: true, Found: value != "", Old: value, Epoch: epoch}
	}
	unknown := func(o RegisterOp, call, end time.Duration) *RegisterOp {
		u := done(o, call, end)
		u.Status = Unknown
		return u
	}
	put := func(value string, epoch uint64) RegisterOp {
		return RegisterOp{Kind: Put, Value: value, Epoch: epoch}
	}
	in := func(sequence int, o RegisterOp) RegisterOp {
		o.Stream, o.Sequence = 1, sequence
		return o
	}
	for name, c := range map[string]struct{ right, wrong []*RegisterOp }{
		"stale read": {
			right: []*RegisterOp{done(put("1000", 1), 0, 2), done(saw("", 0), 1, 3)},
			wrong: []*RegisterOp{done(put("1000", 1), 0, 2), done(saw("", 0), 3, 4)},
		},
		"unknown write, seen and then not": {
			right: []*RegisterOp{unknown(put("1000", 0), 0, 9), done(saw("", 0), 3, 4), done(saw("1000", 1), 5, 6)},
			wrong: []*RegisterOp{unknown(put("1000", 0), 0, 9), done(saw("1000", 1), 3, 4), done(saw("", 0), 5, 6)},
		},
		"unknown write, seen first after its end": {
			right: []*RegisterOp{unknown(put("1000", 0), 0, 4), done(saw("", 0), 3, 5), done(saw("1000", 1), 6, 7)},
			wrong: []*RegisterOp{unknown(put("1000", 0), 0, 4), done(saw("", 0), 5, 6), done(saw("1000", 1), 7, 8)},
		},
		"lost increment": {
			right: []*RegisterOp{
				done(RegisterOp{Kind: Increment, Seen: true, Epoch: 1}, 0, 4),
				done(RegisterOp{Kind: Increment, Seen: true, Found: true, Old: "1", Epoch: 2}, 0, 4),
			},
			wrong: []*RegisterOp{
				done(RegisterOp{Kind: Increment, Seen: true, Epoch: 1}, 0, 4),
				done(RegisterOp{Kind: Increment, Seen: true, Epoch: 2}, 0, 4),
			},
		},
		"compare-and-set that held twice": {
			right: []*RegisterOp{
				done(put("1000", 1), 0, 1),
				done(RegisterOp{Kind: CompareAndSet, Expect: "1000", Value: "2000", Applied: true, Epoch: 2}, 2, 4),
				done(RegisterOp{Kind: CompareAndSet, Expect: "1000", Value: "3000"}, 2, 4),
			},
			wrong: []*RegisterOp{
				done(put("1000", 1), 0, 1),
				done(RegisterOp{Kind: CompareAndSet, Expect: "1000", Value: "2000", Applied: true, Epoch: 2}, 2, 4),
				done(RegisterOp{Kind: CompareAndSet, Expect: "1000", Value: "3000", Applied: true, Epoch: 3}, 2, 4),
			},
		},
		"lost delete": {
			right: []*RegisterOp{done(put("1000", 1), 0, 1), done(RegisterOp{Kind: Delete, Epoch: 2}, 2, 3), done(saw("", 0), 4, 5)},
			wrong: []*RegisterOp{done(put("1000", 1), 0, 1), done(RegisterOp{Kind: Delete, Epoch: 2}, 2, 3), done(saw("1000", 1), 4, 5)},
		},
		"unknown write, incremented": {
			right: []*RegisterOp{
				unknown(put("1000", 0), 0, 9), done(RegisterOp{Kind: Increment, Epoch: 2, Seen: true, Found: true, Old: "1000"}, 1, 3),
				done(saw("1001", 2), 4, 5),
			},
			wrong: []*RegisterOp{
				unknown(put("1000", 0), 0, 9), done(RegisterOp{Kind: Increment, Epoch: 2, Seen: true, Found: true, Old: "1000"}, 1, 3),
				done(saw("1000", 1), 4, 5),
			},
		},
		"unknown compare-and-set after an unknown write": {
			right: []*RegisterOp{
				unknown(put("1000", 0), 0, 9), unknown(RegisterOp{Kind: CompareAndSet, Expect: "1000", Value: "2000"}, 1, 9),
				done(saw("2000", 2), 4, 5),
			},
			wrong: []*RegisterOp{
				unknown(put("1000", 0), 6, 9), unknown(RegisterOp{Kind: CompareAndSet, Expect: "1000", Value: "2000"}, 1, 9),
				done(saw("2000", 2), 4, 5),
			},
		},
		"unknown write, never seen, of a stream": {
			right: []*RegisterOp{unknown(in(1, put("1000", 0)), 0, 9), done(in(2, saw("", 0)), 1, 5)},
			wrong: []*RegisterOp{unknown(in(1, put("1000", 0)), 0, 9), done(in(2, saw("2000", 1)), 1, 5)},
		},
		"epochs in another order": {
			right: []*RegisterOp{done(put("1000", 1), 0, 1), done(put("2000", 2), 2, 3)},
			wrong: []*RegisterOp{done(put("1000", 2), 0, 1), done(put("2000", 1), 2, 3)},
		},
		"get of a stream that overtakes its put": {
			right: []*RegisterOp{done(in(1, put("1000", 1)), 0, 5), done(in(2, saw("1000", 1)), 1, 5)},
			wrong: []*RegisterOp{done(in(1, put("1000", 1)), 0, 5), done(in(2, saw("", 0)), 1, 5)},
		},
		"get of a stream that is overtaken by its put": {
			right: []*RegisterOp{done(in(1, saw("", 0)), 0, 5), done(in(2, put("1000", 1)), 1, 5)},
			wrong: []*RegisterOp{done(in(1, saw("1000", 1)), 0, 5), done(in(2, put("1000", 1)), 1, 5)},
		},
		"writes of a stream in another order": {
			right: []*RegisterOp{done(in(1, put("1000", 1)), 0, 5), done(in(2, put("2000", 2)), 1, 5)},
			wrong: []*RegisterOp{done(in(1, put("1000", 2)), 0, 5), done(in(2, put("2000", 1)), 1, 5)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if err := CheckRegisters(c.right, time.Minute); err != nil {
				t.Errorf("the right history: %v", err)
			}
			if CheckRegisters(c.wrong, time.Minute) == nil {
				t.Error("the wrong history passes")
			}
		})
	}
}

// TestRegistersCompareTheEpochsOfAStream: across keys, where no order of one key tells anything.
func TestRegistersCompareTheEpochsOfAStream(t *testing.T) {
	write := &RegisterOp{Key: "a", Kind: Put, Epoch: 7, Stream: 1, Sequence: 1, Status: Committed, Return: 9}
	read := &RegisterOp{Key: "b", Kind: Get, Seen: true, ReadEpoch: 7, Stream: 1, Sequence: 2, Status: Committed, Return: 9}
	if err := CheckRegisters([]*RegisterOp{write, read}, time.Minute); err != nil {
		t.Error(err)
	}
	read.ReadEpoch = 6
	if CheckRegisters([]*RegisterOp{write, read}, time.Minute) == nil {
		t.Error("a read of a snapshot before its stream's write passes")
	}
}
