package server

import (
	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// txnAccess is the permission of the operations of a Transact stream, and of the transaction as a whole. The footprint of the whole
// is not kept: it is in the transaction itself, which is asked only if the users have changed since it began.
type txnAccess struct {
	operation *access
	whole     access
	table     uint64 // number of the one with which all operations of the open transaction were checked
	mixed     bool   // they were not all checked with the same one
}

// transactRow is what operations of transactions need.
var transactRow = rpcRows[pb.TransactionService_Transact_FullMethodName]

func (t *txnAccess) begin(a *access) {
	t.operation = a
	t.whole.gate, t.whole.conn, t.whole.header = a.gate, a.conn, a.header
}

// check checks a request. A rollback is always permitted.
func (t *txnAccess) check(req *pb.TransactRequest, size int) error {
	switch req.GetRequest().(type) {
	case *pb.TransactRequest_Rollback, *pb.TransactRequest_RollbackTo:
		return nil
	}
	if err := t.operation.check(transactRow, req); err != nil {
		return err
	}
	t.mixed = t.mixed || t.table != t.operation.table
	return t.operation.take(size)
}

// forget drops the request that was checked last: the stream may be idle for long after it, and nothing counts it any more.
func (t *txnAccess) forget() { t.operation.request, t.whole.request = nil, nil }

// begun says that the request which was checked last has begun a transaction. A begin that is refused, because a transaction is
// open, does not: what that one has done was checked with the tables of then.
func (t *txnAccess) begun() { t.table, t.mixed = t.operation.table, false }

// commit checks all that the transaction has read and written, if the users have changed since it began. The result checks it
// again under the latches.
func (t *txnAccess) commit(txn *mvcc.Txn) (*access, error) {
	w := &t.whole
	w.caller = t.operation.caller
	if t.mixed {
		return w, w.check(&rowOfTxn, txn)
	}
	w.row, w.request, w.table = &rowOfTxn, txn, t.table
	return w, w.again()
}
