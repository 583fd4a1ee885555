package server

import (
	"path"
	"strings"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionpbalpha "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// rpcRow says what a method needs. docs/security.md has the table, made by `make generate`.
type rpcRow struct {
	method    string // full name, as in the path of a request
	open      bool   // every client may call it, also one that is not known
	sender    bool   // but its handler refuses those that are not known, whether users are checked or not
	actions   auth.Actions
	footprint func(*footprint, any) // of a request, or of each message of a stream; nil: no keys
	itself    bool                  // the handler checks each message: a refusal does not end the stream
	class     audit.Class           // of its lines in the audit log; empty: its messages have lines, or none has
	needs     string                // for the documentation

	lasts  bool             // the request may wait, or work, for long: a unary one has an access also while users are not checked
	lists  listKind         // where its answer comes from, if that may be large
	counts telemetry.Method // in the metrics
	rare   bool             // the metrics do not have it

	reflects bool // at most reflectionsMax of its streams are open at once
}

// rpcRows is the one place that says what each method needs. A method without a row is refused.
var rpcRows = indexRows()

func indexRows() map[string]*rpcRow {
	rows := map[string]*rpcRow{}
	for i := range rpcTable {
		row := &rpcTable[i]
		name, known := telemetry.MethodNamed(path.Base(row.method))
		row.counts, row.rare = name, !known || !strings.HasPrefix(row.method, "/epochkv.")
		rows[row.method] = row
	}
	return rows
}

var rpcTable = []rpcRow{
	{method: pb.KVService_Get_FullMethodName, class: audit.ClassRead, footprint: of(footprintOfGet), needs: "read the key"},
	{method: pb.KVService_GetStream_FullMethodName, lasts: true, class: audit.ClassRead, footprint: of(footprintOfGetStream), needs: "read the key"},
	{method: pb.KVService_Put_FullMethodName, class: audit.ClassWrite, footprint: of(footprintOfPut), needs: "write the key; lease it, if the request names a lease; read the keys of preconditions"},
	{method: pb.KVService_Delete_FullMethodName, class: audit.ClassWrite, footprint: of(footprintOfDelete), needs: "write the key; read the keys of preconditions"},
	{method: pb.KVService_BatchGet_FullMethodName, class: audit.ClassRead, footprint: of(footprintOfBatchGet), needs: "read each key"},
	{method: pb.KVService_BatchWrite_FullMethodName, class: audit.ClassWrite, footprint: of(footprintOfBatchWrite), needs: "write each key; lease those with a lease; read the keys of preconditions"},
	{method: pb.KVService_DeleteRange_FullMethodName, class: audit.ClassWrite, footprint: of(footprintOfDeleteRange), needs: "write and read the whole range: the answer has a count; read the keys of preconditions"},
	{method: pb.KVService_Scan_FullMethodName, lasts: true, class: audit.ClassRead, footprint: of(footprintOfScan), needs: "read the whole range, also to count, and with a resume token"},
	{method: pb.KVService_Invoke_FullMethodName, class: audit.ClassWrite, footprint: of(footprintOfInvoke), needs: "read and write the key; read the keys of preconditions"},
	{method: pb.KVService_InvokeAll_FullMethodName, class: audit.ClassWrite, footprint: of(footprintOfInvokeAll), needs: "read and write each key; read the keys of preconditions"},
	{method: pb.KVService_BulkLoad_FullMethodName, lasts: true, class: audit.ClassWrite, footprint: of(footprintOfBulkLoad), needs: "write each key"},
	{method: pb.KVService_Pipeline_FullMethodName, itself: true, footprint: of(footprintOfPipelined), needs: "for each message what the same request needs elsewhere"},

	{method: pb.TransactionService_Execute_FullMethodName, class: audit.ClassWrite, footprint: of(footprintOfExecute), needs: "read the keys and ranges of conditions; for the operations of both branches what the same request needs elsewhere"},
	{method: pb.TransactionService_Transact_FullMethodName, itself: true, footprint: of(footprintOfTransact), needs: "for each operation what the same request needs elsewhere; and for all of them at once when it commits"},
	{method: pb.TransactionService_GetOutcome_FullMethodName, class: audit.ClassWrite, needs: "to be the user that sent the request"},

	{method: pb.FeedService_Watch_FullMethodName, class: audit.ClassRead, itself: true, footprint: of(footprintOfWatch), needs: "read all ranges, also with a resume token"},
	{method: pb.FeedService_History_FullMethodName, class: audit.ClassRead, footprint: of(footprintOfHistory), needs: "read the key, or the whole range"},
	{method: pb.FeedService_Diff_FullMethodName, class: audit.ClassRead, footprint: of(footprintOfDiff), needs: "read the whole range"},

	{method: pb.LeaseService_GrantLease_FullMethodName, class: audit.ClassWrite, footprint: anyLease, needs: "lease some key; for an id of which a damaged page hides the record, what RevokeLease needs, as far as that can be read"},
	{method: pb.LeaseService_RevokeLease_FullMethodName, class: audit.ClassWrite, footprint: anyLease, needs: "lease some key; write every key of the lease, and lease the names of its locks"},
	{method: pb.LeaseService_KeepAlive_FullMethodName, lasts: true, class: audit.ClassWrite, footprint: anyLease, needs: "lease some key"},
	{method: pb.LeaseService_GetLease_FullMethodName, lists: listStored, class: audit.ClassRead, footprint: anyLease, needs: "lease some key; read every key of the lease, if the request asks for them"},
	{method: pb.LeaseService_ListLeases_FullMethodName, lists: listLeases, class: audit.ClassRead, actions: auth.ActionObserve},

	{method: pb.LockService_AcquireLock_FullMethodName, lasts: true, class: audit.ClassWrite, footprint: of(footprintOfAcquireLock), needs: "lease the name, as if it were a key"},
	{method: pb.LockService_ReleaseLock_FullMethodName, class: audit.ClassWrite, footprint: of(footprintOfReleaseLock), needs: "lease the name"},
	{method: pb.LockService_GetLock_FullMethodName, class: audit.ClassRead, footprint: of(footprintOfGetLock), needs: "read the name"},
	{method: pb.LockService_ObserveLock_FullMethodName, lasts: true, class: audit.ClassRead, footprint: of(footprintOfObserveLock), needs: "read the name"},
	{method: pb.LockService_ListLocks_FullMethodName, lists: listLocks, class: audit.ClassRead, footprint: of(footprintOfListLocks), needs: "read the whole range of names, as if they were keys"},

	{method: pb.AdminService_Status_FullMethodName, class: audit.ClassRead, actions: auth.ActionObserve},
	{method: pb.AdminService_ListTransactions_FullMethodName, lists: listMemory, class: audit.ClassRead, actions: auth.ActionObserve},
	{method: pb.AdminService_EndTransaction_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},
	{method: pb.AdminService_ListSnapshots_FullMethodName, lists: listMemory, class: audit.ClassRead, actions: auth.ActionObserve},
	{method: pb.AdminService_EndSnapshot_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},
	{method: pb.AdminService_Verify_FullMethodName, lasts: true, class: audit.ClassAdmin, actions: auth.ActionBackup},
	{method: pb.AdminService_Checkpoint_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},
	{method: pb.AdminService_FinalizeUpgrade_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},
	{method: pb.AdminService_Clock_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionObserve, footprint: of(footprintOfClock), needs: "`operate`, to accept the system's clock"},
	{method: pb.AdminService_ReloadTLS_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},
	{method: pb.AdminService_SetConfig_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},
	{method: pb.AdminService_ReloadConfig_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},
	{method: pb.AdminService_ResizeCache_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},
	{method: pb.AdminService_Space_FullMethodName, lasts: true, class: audit.ClassRead, actions: auth.ActionObserve, footprint: of(footprintOfSpace), needs: "read all keys, for sizes by prefix"},
	{method: pb.AdminService_GetConfig_FullMethodName, class: audit.ClassRead, actions: auth.ActionObserve},
	{method: pb.AdminService_ListWatches_FullMethodName, lists: listMemory, class: audit.ClassRead, actions: auth.ActionObserve, needs: "ranges are shown to users that may read them"},
	{method: pb.AdminService_SlowRequests_FullMethodName, lists: listMemory, class: audit.ClassRead, actions: auth.ActionDebug, needs: "the answer has the beginnings of keys"},
	{method: pb.AdminService_EndWatch_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},
	{method: pb.AdminService_ListHolds_FullMethodName, lists: listMemory, class: audit.ClassRead, actions: auth.ActionObserve},
	{method: pb.AdminService_ArchiveStatus_FullMethodName, class: audit.ClassRead, actions: auth.ActionObserve},
	{method: pb.AdminService_TakeHold_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},
	{method: pb.AdminService_EndHold_FullMethodName, class: audit.ClassAdmin, actions: auth.ActionOperate},

	{method: pb.BackupService_CreateBackup_FullMethodName, lasts: true, class: audit.ClassAdmin, actions: auth.ActionBackup, needs: "a backup has all keys"},
	{method: pb.BackupService_GetBackupStatus_FullMethodName, class: audit.ClassRead, actions: auth.ActionObserve},
	{method: pb.BackupService_ListBackups_FullMethodName, lists: listTarget, class: audit.ClassRead, actions: auth.ActionBackup},
	{method: pb.BackupService_VerifyBackup_FullMethodName, lasts: true, class: audit.ClassAdmin, actions: auth.ActionBackup},
	{method: pb.BackupService_PruneBackups_FullMethodName, lasts: true, class: audit.ClassAdmin, actions: auth.ActionBackup, needs: "it deletes backups"},

	// AuthService authenticates its clients itself, also while users are not checked.
	{method: pb.AuthService_Login_FullMethodName, class: audit.ClassAuth, open: true, needs: "nothing: a password is the credential"},
	{method: pb.AuthService_Logout_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "a token, which it revokes"},
	{method: pb.AuthService_Bootstrap_FullMethodName, class: audit.ClassAuth, open: true, needs: "nothing: the token that the server prints"},
	{method: pb.AuthService_WhoAmI_FullMethodName, class: audit.ClassAuth, open: true, needs: "nothing"},
	{method: pb.AuthService_Enable_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "administrative action users, and all rights"},
	{method: pb.AuthService_Disable_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "administrative action users"},
	{method: pb.AuthService_Explain_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "to be that user, or administrative action users"},
	{method: pb.AuthService_CreateUser_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "administrative action users"},
	{method: pb.AuthService_UpdateUser_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "administrative action users"},
	{method: pb.AuthService_DeleteUser_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "administrative action users"},
	{method: pb.AuthService_ListUsers_FullMethodName, lists: listUsers, class: audit.ClassAuth, open: true, sender: true, needs: "administrative action users"},
	{method: pb.AuthService_SetPassword_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "to be that user, and its password; or administrative action users"},
	{method: pb.AuthService_CreateRole_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "administrative action users"},
	{method: pb.AuthService_UpdateRole_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "administrative action users"},
	{method: pb.AuthService_DeleteRole_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "administrative action users"},
	{method: pb.AuthService_ListRoles_FullMethodName, lists: listUsers, class: audit.ClassAuth, open: true, sender: true, needs: "administrative action users"},
	{method: pb.AuthService_CreateToken_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "to be that user, or administrative action users"},
	{method: pb.AuthService_ListTokens_FullMethodName, lists: listUsers, class: audit.ClassAuth, open: true, sender: true, needs: "to be that user, or administrative action users"},
	{method: pb.AuthService_RevokeToken_FullMethodName, class: audit.ClassAuth, open: true, sender: true, needs: "to be its user, or administrative action users"},
	{method: healthpb.Health_Check_FullMethodName, open: true},
	{method: healthpb.Health_List_FullMethodName, open: true},
	{method: healthpb.Health_Watch_FullMethodName, open: true},
	{method: reflectionpb.ServerReflection_ServerReflectionInfo_FullMethodName, open: true, reflects: true},
	{method: reflectionpbalpha.ServerReflection_ServerReflectionInfo_FullMethodName, open: true, reflects: true},
}

// of is a footprint function of one type. A message of another type needs everything.
func of[R any](add func(*footprint, R)) func(*footprint, any) {
	return func(f *footprint, request any) {
		r, ok := request.(R)
		if !ok {
			f.everything()
			return
		}
		add(f, r)
	}
}

// everything is what a message needs that no function knows.
func (f *footprint) everything() {
	if f.collect != nil {
		f.collect(auth.RightRead, auth.Range{})
		f.collect(auth.RightWrite, auth.Range{})
		return
	}
	f.parts.Everything()
	f.compare()
}

func anyLease(f *footprint, _ any) { f.parts.AnyLease() }

func (f *footprint) read(key []byte)  { f.key(auth.RightRead, key) }
func (f *footprint) write(key []byte) { f.key(auth.RightWrite, key) }

// attach is the right to put a key under a lease: the end of the lease deletes it.
func (f *footprint) attach(lease uint64, key []byte) {
	if lease != 0 {
		f.key(auth.RightLease, key)
	}
}

// span adds a range of a request. What is no range has no keys: the handlers refuse it by the same function.
func (f *footprint) span(right auth.Right, r *pb.KeyRange) {
	b, err := toBounds(r)
	if err != nil {
		return
	}
	f.add(right, auth.Range{Lower: b.lower, Upper: b.upper})
}

// preconditions reveal whether keys exist, and whether a lock is held.
func (f *footprint) preconditions(list []*pb.Precondition) {
	for _, p := range list {
		f.precondition(p)
	}
}

func (f *footprint) precondition(p *pb.Precondition) {
	if fence := p.GetFence(); fence != nil {
		f.read(fence.GetName())
		return
	}
	f.read(p.GetKey())
}

func (f *footprint) mutation(m *pb.Mutation) {
	f.write(m.GetKey())
	f.attach(m.GetLeaseId(), m.GetKey())
}

// invocation returns values and whether there was one, so it also reads.
func (f *footprint) invocation(i *pb.Invocation) {
	f.read(i.GetKey())
	f.write(i.GetKey())
}

// invoked is invocation for operations whose messages are dropped. When they are gone, too, what was named is not known any more.
func (f *footprint) invoked(ops []mvcc.Invoke) {
	if len(ops) == 0 {
		f.everything()
	}
	for i := range ops {
		f.read(ops[i].Key)
		f.write(ops[i].Key)
	}
}

func footprintOfGet(f *footprint, r *pb.GetRequest) { f.read(r.GetKey()) }

func footprintOfGetStream(f *footprint, r *pb.GetStreamRequest) { f.read(r.GetKey()) }

func footprintOfPut(f *footprint, r *pb.PutRequest) {
	f.write(r.GetKey())
	f.attach(r.GetLeaseId(), r.GetKey())
	f.preconditions(r.GetPreconditions())
}

func footprintOfDelete(f *footprint, r *pb.DeleteRequest) {
	f.write(r.GetKey())
	f.preconditions(r.GetPreconditions())
}

func footprintOfBatchGet(f *footprint, r *pb.BatchGetRequest) {
	f.reads(r.GetKeys())
}

func (f *footprint) reads(list [][]byte) {
	for _, key := range list {
		f.read(key)
	}
}

func footprintOfBatchWrite(f *footprint, r *pb.BatchWriteRequest) {
	f.mutations(r.GetMutations())
	f.preconditions(r.GetPreconditions())
}

func (f *footprint) mutations(list []*pb.Mutation) {
	for _, m := range list {
		f.mutation(m)
	}
}

func footprintOfDeleteRange(f *footprint, r *pb.DeleteRangeRequest) {
	f.deleteRange(r.GetRange())
	f.preconditions(r.GetPreconditions())
}

// deleteRange is counted in the answer.
func (f *footprint) deleteRange(r *pb.KeyRange) {
	f.span(auth.RightRead, r)
	f.span(auth.RightWrite, r)
}

func footprintOfScan(f *footprint, r *pb.ScanRequest) { f.span(auth.RightRead, r.GetRange()) }

func footprintOfInvoke(f *footprint, r *pb.InvokeRequest) {
	f.invocation(r.GetInvocation())
	f.preconditions(r.GetPreconditions())
}

func footprintOfInvokeAll(f *footprint, r *pb.InvokeAllRequest) {
	for _, i := range r.GetInvocations() {
		f.invocation(i)
	}
	f.preconditions(r.GetPreconditions())
}

func footprintOfBulkLoad(f *footprint, r interface{ GetEntries() []*pb.BulkEntry }) {
	for _, e := range r.GetEntries() {
		f.write(e.GetKey())
	}
}

// footprintOfPipelined is that of the request in the message. An empty message touches nothing, and is refused later.
func footprintOfPipelined(f *footprint, m *pb.PipelineRequest) {
	switch r := m.GetRequest().(type) {
	case nil:
	case *pb.PipelineRequest_Get:
		footprintOfGet(f, r.Get)
	case *pb.PipelineRequest_Put:
		footprintOfPut(f, r.Put)
	case *pb.PipelineRequest_Delete:
		footprintOfDelete(f, r.Delete)
	case *pb.PipelineRequest_BatchGet:
		footprintOfBatchGet(f, r.BatchGet)
	case *pb.PipelineRequest_BatchWrite:
		footprintOfBatchWrite(f, r.BatchWrite)
	case *pb.PipelineRequest_DeleteRange:
		footprintOfDeleteRange(f, r.DeleteRange)
	case *pb.PipelineRequest_Invoke:
		footprintOfInvoke(f, r.Invoke)
	case *pb.PipelineRequest_InvokeAll:
		footprintOfInvokeAll(f, r.InvokeAll)
	default:
		f.everything()
	}
}

func footprintOfExecute(f *footprint, r *pb.ExecuteRequest) {
	for _, c := range r.GetConditions() {
		switch is := c.GetCondition().(type) {
		case nil:
		case *pb.TxnCondition_Key:
			f.precondition(is.Key)
		case *pb.TxnCondition_Range:
			f.span(auth.RightRead, is.Range.GetRange())
		default:
			f.everything()
		}
	}
	f.operations(r.GetThenOperations())
	f.operations(r.GetElseOperations()) // whichever branch is executed, both are checked
}

func (f *footprint) operations(list []*pb.Operation) {
	for _, o := range list {
		switch is := o.GetOperation().(type) {
		case nil:
		case *pb.Operation_Get:
			f.read(is.Get.GetKey())
		case *pb.Operation_Scan:
			f.span(auth.RightRead, is.Scan.GetRange())
		case *pb.Operation_Write:
			f.mutation(is.Write)
		case *pb.Operation_DeleteRange:
			f.deleteRange(is.DeleteRange.GetRange())
		case *pb.Operation_Invoke:
			f.invocation(is.Invoke)
		default:
			f.everything()
		}
	}
}

// footprintOfTransact is that of one operation; footprintOfTxn is that of the whole transaction.
func footprintOfTransact(f *footprint, m *pb.TransactRequest) {
	switch r := m.GetRequest().(type) {
	case nil, *pb.TransactRequest_Begin, *pb.TransactRequest_Savepoint, *pb.TransactRequest_RollbackTo, *pb.TransactRequest_Commit,
		*pb.TransactRequest_Rollback:
	case *pb.TransactRequest_Get:
		f.read(r.Get.GetKey())
	case *pb.TransactRequest_BatchGet:
		f.reads(r.BatchGet.GetKeys())
	case *pb.TransactRequest_Scan:
		f.span(auth.RightRead, r.Scan.GetRange())
	case *pb.TransactRequest_Write:
		f.mutations(r.Write.GetMutations())
	case *pb.TransactRequest_DeleteRange:
		f.deleteRange(r.DeleteRange.GetRange())
	case *pb.TransactRequest_Invoke:
		f.invocation(r.Invoke)
	default:
		f.everything()
	}
}

// footprintOfTxn is that of everything that a transaction has written, and has read as far as the commit validates it.
func footprintOfTxn(f *footprint, t *mvcc.Txn) {
	t.Visit(func(key []byte, lease uint64) {
		f.write(key)
		f.attach(lease, key)
	}, func(lower, upper []byte, single bool) {
		f.add(auth.RightRead, auth.Range{Lower: lower, Upper: upper, Single: single})
	})
}

// rowOfTxn is what the commit of a transaction needs.
var rowOfTxn = rpcRow{footprint: of(footprintOfTxn)}

// footprintOfWatch: what a watch shows is in its ranges, previous values and the ends of loaded ranges included.
func footprintOfWatch(f *footprint, w *streamWatch) {
	for _, r := range w.options.ranges {
		f.add(auth.RightRead, auth.Range{Lower: r.Lower, Upper: r.Upper})
	}
}

func footprintOfHistory(f *footprint, r *pb.HistoryRequest) {
	if len(r.GetKey()) > 0 {
		f.read(r.GetKey())
		return
	}
	f.span(auth.RightRead, r.GetRange())
}

func footprintOfDiff(f *footprint, r *pb.DiffRequest) { f.span(auth.RightRead, r.GetRange()) }

func footprintOfAcquireLock(f *footprint, r *pb.AcquireLockRequest) {
	f.key(auth.RightLease, r.GetName())
}

func footprintOfReleaseLock(f *footprint, r *pb.ReleaseLockRequest) {
	f.key(auth.RightLease, r.GetName())
}
func footprintOfGetLock(f *footprint, r *pb.GetLockRequest)         { f.read(r.GetName()) }
func footprintOfObserveLock(f *footprint, r *pb.ObserveLockRequest) { f.read(r.GetName()) }

func footprintOfListLocks(f *footprint, r *pb.ListLocksRequest) {
	f.span(auth.RightRead, &pb.KeyRange{Start: r.GetStart(), End: r.GetEnd()})
}

func footprintOfClock(f *footprint, r *pb.ClockRequest) {
	if r.GetAccept() {
		f.parts.Action(auth.ActionOperate)
	}
}

// footprintOfSpace: prefixes are beginnings of keys.
func footprintOfSpace(f *footprint, r *pb.SpaceRequest) {
	if r.GetByPrefix() {
		f.add(auth.RightRead, auth.Range{})
	}
}
