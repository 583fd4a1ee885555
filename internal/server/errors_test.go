package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/auth/users"
	"github.com/epochkv/epochkv/internal/backup"
	storeclock "github.com/epochkv/epochkv/internal/clock"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

func retaining(c *config.Config) { c.Retention = time.Hour }

func withoutHTTP(c *config.Config) { c.HTTP = "" }

// TestEveryReasonHasItsCodeAndDetails is the table of docs/errors.md: a new reason adds a
// row.
func TestEveryReasonHasItsCodeAndDetails(t *testing.T) {
	type row struct {
		err      error
		code     codes.Code
		metadata []string
		field    bool
		retry    bool
	}
	rows := map[pb.ErrorReason]row{
		pb.ErrorReason_ERROR_REASON_INVALID_REQUEST:          {err: invalid("f", "x"), code: codes.InvalidArgument, field: true},
		pb.ErrorReason_ERROR_REASON_KEY_EMPTY:                {err: mvcc.ErrEmptyKey, code: codes.InvalidArgument, field: true},
		pb.ErrorReason_ERROR_REASON_KEY_TOO_LARGE:            {err: &mvcc.LimitError{What: "key bytes"}, code: codes.InvalidArgument, metadata: []string{"limit", "size"}, field: true},
		pb.ErrorReason_ERROR_REASON_VALUE_TOO_LARGE:          {err: &mvcc.LimitError{What: "value bytes"}, code: codes.InvalidArgument, metadata: []string{"limit", "size"}, field: true},
		pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE:          {err: &mvcc.LimitError{What: "batch operations"}, code: codes.InvalidArgument, metadata: []string{"limit", "size", "unit"}, field: true},
		pb.ErrorReason_ERROR_REASON_BATCH_EMPTY:              {err: mvcc.ErrEmptyBatch, code: codes.InvalidArgument, field: true},
		pb.ErrorReason_ERROR_REASON_DUPLICATE_KEY:            {err: &batch.DuplicateKeyError{}, code: codes.InvalidArgument, metadata: []string{"key"}, field: true},
		pb.ErrorReason_ERROR_REASON_INVALID_RANGE:            {err: invalidRange("x"), code: codes.InvalidArgument, field: true},
		pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN:     {err: invalidToken("x"), code: codes.InvalidArgument, field: true},
		pb.ErrorReason_ERROR_REASON_FOREIGN_RESUME_TOKEN:     {err: foreignToken(), code: codes.InvalidArgument, field: true},
		pb.ErrorReason_ERROR_REASON_BULK_LOAD_BUSY:           {err: mvcc.ErrBulkLoadBusy, code: codes.ResourceExhausted, retry: true},
		pb.ErrorReason_ERROR_REASON_BULK_LOAD_QUARANTINE:     {err: mvcc.ErrBulkLoadQuarantine, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_BULK_LOAD_OVERTAKEN:      {err: mvcc.ErrBulkLoadOvertaken, code: codes.Aborted, retry: true},
		pb.ErrorReason_ERROR_REASON_CONFLICT:                 {err: &mvcc.ConflictError{}, code: codes.Aborted, metadata: []string{"key", "epoch"}, retry: true},
		pb.ErrorReason_ERROR_REASON_PRECONDITION_FAILED:      {err: &mvcc.PreconditionError{}, code: codes.FailedPrecondition, metadata: []string{"key", "index", "condition", "epoch"}},
		pb.ErrorReason_ERROR_REASON_OVERLOADED:               {err: errOverloaded, code: codes.ResourceExhausted, retry: true},
		pb.ErrorReason_ERROR_REASON_MEMORY_FULL:              {err: mvcc.ErrMemoryFull, code: codes.ResourceExhausted, retry: true},
		pb.ErrorReason_ERROR_REASON_DISK_FULL:                {err: vfs.ErrNoSpace, code: codes.ResourceExhausted, retry: true},
		pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS:        {err: mvcc.ErrTooManySessions, code: codes.ResourceExhausted, retry: true},
		pb.ErrorReason_ERROR_REASON_TOO_MANY_SNAPSHOT_LEASES: {code: codes.ResourceExhausted}, // of older servers
		pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE:            {err: &mvcc.SnapshotGoneError{Epoch: 1, Oldest: 2, Newest: 3}, code: codes.OutOfRange, metadata: []string{"epoch", "oldest"}},
		pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE:       {err: &mvcc.SnapshotGoneError{Epoch: 4, Oldest: 2, Newest: 3}, code: codes.OutOfRange, metadata: []string{"epoch", "visible"}},
		pb.ErrorReason_ERROR_REASON_CORRUPTION: {
			err: &storage.CorruptionError{KeyLower: []byte("a")}, code: codes.DataLoss,
			metadata: []string{"file", "offset", "key_lower", "key_upper"},
		},
		pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN:        {err: errShuttingDown, code: codes.Unavailable, retry: true},
		pb.ErrorReason_ERROR_REASON_READ_ONLY:            {err: fmt.Errorf("%w: %w", mvcc.ErrFailed, vfs.ErrNoSpace), code: codes.Unavailable, metadata: []string{"cause"}},
		pb.ErrorReason_ERROR_REASON_EXPIRED_BEFORE_START: {err: errExpired, code: codes.DeadlineExceeded},
		pb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN:      {err: &mvcc.OutcomeUnknownError{Epoch: 1, Cause: mvcc.ErrFailed}, code: codes.Internal, metadata: []string{"epoch", "cause"}},
		pb.ErrorReason_ERROR_REASON_INTERNAL:             {err: errors.New("surprise"), code: codes.Internal},
		pb.ErrorReason_ERROR_REASON_UNIMPLEMENTED:        {err: errUnimplemented, code: codes.Unimplemented},
		pb.ErrorReason_ERROR_REASON_TYPE_ERROR:           {err: &mvcc.TypeError{}, code: codes.FailedPrecondition, metadata: []string{"key", "index"}},
		pb.ErrorReason_ERROR_REASON_TXN_READ_ONLY:        {err: mvcc.ErrReadOnly, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_NO_SAVEPOINT:         {err: mvcc.ErrNoSavepoint, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_TXN_STATE:            {err: errNotBegun, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_TXN_FAILED:           {err: &txnFailedError{cause: mvcc.ErrEmptyKey}, code: codes.FailedPrecondition, metadata: []string{"cause"}},
		pb.ErrorReason_ERROR_REASON_TXN_TOO_LARGE:        {err: &mvcc.LimitError{What: "transaction bytes"}, code: codes.InvalidArgument, metadata: []string{"limit", "size", "unit"}},
		pb.ErrorReason_ERROR_REASON_TOO_MANY_TXNS:        {err: errTooManyTxns, code: codes.ResourceExhausted, retry: true},
		pb.ErrorReason_ERROR_REASON_TXN_TIMEOUT:          {err: &txnTimeoutError{}, code: codes.Aborted, metadata: []string{"limit", "timeout"}},
		pb.ErrorReason_ERROR_REASON_TXN_ENDED:            {err: errTxnEnded, code: codes.Aborted},
		pb.ErrorReason_ERROR_REASON_TXN_NOT_FOUND:        {err: errNoSuchTxn, code: codes.NotFound},
		pb.ErrorReason_ERROR_REASON_MESSAGE_INCOMPLETE:   {err: errIncomplete, code: codes.Aborted},
		pb.ErrorReason_ERROR_REASON_SNAPSHOT_NOT_FOUND:   {err: errNoSuchSnapshot, code: codes.NotFound},
		pb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED:   {err: &mvcc.RequestExpiredError{Cutoff: 1, Now: 2}, code: codes.FailedPrecondition, metadata: []string{"server_time", "cutoff"}},
		pb.ErrorReason_ERROR_REASON_REQUEST_ID_REUSED:    {err: mvcc.ErrRequestReused, code: codes.InvalidArgument, field: true},
		pb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE: {err: &requestTimeError{at: 1}, code: codes.InvalidArgument, metadata: []string{"server_time"}, field: true},
		pb.ErrorReason_ERROR_REASON_REQUEST_CANCELLED:    {err: mvcc.ErrRequestCancelled, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_FEATURE_LEVEL:        {err: &mvcc.FeatureLevelError{Needs: 2, Level: 1}, code: codes.FailedPrecondition, metadata: []string{"needs", "level"}},
		pb.ErrorReason_ERROR_REASON_INVALID_TTL:          {err: invalidTTL("ttl_ms", "is wrong"), code: codes.InvalidArgument, field: true},
		pb.ErrorReason_ERROR_REASON_HISTORY_GONE:         {err: &historyGoneError{after: 1, oldest: 2}, code: codes.OutOfRange, metadata: []string{"epoch", "oldest"}},
		pb.ErrorReason_ERROR_REASON_LINEAGE_CHANGED:      {err: &lineageError{}, code: codes.FailedPrecondition, metadata: []string{"lineage", "token_lineage"}},
		pb.ErrorReason_ERROR_REASON_TOO_MANY_WATCHES:     {err: &feed.LimitError{Limit: 1}, code: codes.ResourceExhausted, metadata: []string{"limit"}, retry: true},
		pb.ErrorReason_ERROR_REASON_WATCH_STALLED:        {err: &watchStalledError{timeout: 1}, code: codes.Aborted, metadata: []string{"timeout"}},
		pb.ErrorReason_ERROR_REASON_WATCH_NOT_FOUND:      {err: errNoSuchWatch, code: codes.NotFound},
		pb.ErrorReason_ERROR_REASON_WATCH_AHEAD:          {err: &feed.AheadError{Stable: 1}, code: codes.Unavailable, metadata: []string{"epoch", "visible"}, retry: true},
		pb.ErrorReason_ERROR_REASON_WATCH_ENDED:          {err: errWatchEnded, code: codes.Aborted},
		pb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND:      {err: &lease.Error{ID: 1, Err: lease.ErrNotFound}, code: codes.NotFound, metadata: []string{"lease"}},
		pb.ErrorReason_ERROR_REASON_LEASE_REVOKING:       {err: &lease.Error{ID: 1, Err: lease.ErrRevoking}, code: codes.FailedPrecondition, metadata: []string{"lease"}},
		pb.ErrorReason_ERROR_REASON_LEASE_EXISTS:         {err: &lease.Error{ID: 1, Err: lease.ErrExists}, code: codes.AlreadyExists, metadata: []string{"lease"}},
		pb.ErrorReason_ERROR_REASON_TOO_MANY_LEASES:      {err: lease.ErrTooMany, code: codes.ResourceExhausted, retry: true},
		pb.ErrorReason_ERROR_REASON_TOO_MANY_LEASE_KEYS: {
			err: &lease.Error{ID: 1, Err: lease.ErrTooManyKeys}, code: codes.ResourceExhausted, metadata: []string{"lease", "limit"}, retry: true,
		},
		pb.ErrorReason_ERROR_REASON_TOO_MANY_WAITERS:     {err: lease.ErrWaiters, code: codes.ResourceExhausted, retry: true},
		pb.ErrorReason_ERROR_REASON_FENCED:               {err: &mvcc.PreconditionError{Condition: mvcc.Condition{Kind: mvcc.LockHeld}}, code: codes.FailedPrecondition, metadata: []string{"key", "token", "index"}},
		pb.ErrorReason_ERROR_REASON_TLS_NOT_CONFIGURED:   {err: errNoTLS, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_AUDIT_UNAVAILABLE:    {err: audit.ErrUnavailable, code: codes.Unavailable, retry: true},
		pb.ErrorReason_ERROR_REASON_TLS_RELOAD_FAILED:    {err: &reloadError{errors.New("x")}, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_RESTART_NEEDED:       {err: &restartNeededError{"memory"}, code: codes.FailedPrecondition, metadata: []string{"option"}},
		pb.ErrorReason_ERROR_REASON_CONFIG_RELOAD_FAILED: {err: &configReloadError{errors.New("x")}, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_BACKUP_RUNNING:       {err: errBackupRunning, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_BACKUP_DAMAGED:       {err: &backupError{"x", backup.ErrDamaged}, code: codes.DataLoss},
		pb.ErrorReason_ERROR_REASON_BACKUP_FAILED:        {err: &backupError{"the backup was not made", errors.New("x")}, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_ARCHIVE_IN_USE:       {err: &archiveInUseError{owner: &archive.Owner{Host: "h", Process: 1}}, code: codes.FailedPrecondition, metadata: []string{"host", "process"}},
		pb.ErrorReason_ERROR_REASON_HOLD_NOT_FOUND:       {err: mvcc.ErrNoHold, code: codes.NotFound},
		pb.ErrorReason_ERROR_REASON_TOO_MANY_HOLDS:       {err: mvcc.ErrTooManyHolds, code: codes.ResourceExhausted, metadata: []string{"limit"}, retry: true},
		pb.ErrorReason_ERROR_REASON_CLOCK_EARLIER:        {err: &storeclock.EarlierError{By: time.Hour}, code: codes.FailedPrecondition, metadata: []string{"difference_us"}},
	}
	maps.Copy(rows, map[pb.ErrorReason]row{
		pb.ErrorReason_ERROR_REASON_UNAUTHENTICATED: {err: auth.ErrUnauthenticated, code: codes.Unauthenticated},
		pb.ErrorReason_ERROR_REASON_TOKEN_EXPIRED:   {err: auth.ErrTokenExpired, code: codes.Unauthenticated},
		pb.ErrorReason_ERROR_REASON_PERMISSION_DENIED: {
			err:  &auth.DeniedError{User: "u", Right: auth.RightRead, Range: auth.Range{Lower: []byte("a"), Single: true}},
			code: codes.PermissionDenied, metadata: []string{"user", "right", "key"},
		},
		pb.ErrorReason_ERROR_REASON_AUTH_NOT_ENABLED: {err: users.ErrNotEnabled, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_AUTH_NOT_FOUND:   {err: &users.NotFoundError{Kind: "user", Name: "u"}, code: codes.NotFound, metadata: []string{"kind", "name"}},
		pb.ErrorReason_ERROR_REASON_AUTH_EXISTS:      {err: &users.ExistsError{Kind: "user", Name: "u"}, code: codes.AlreadyExists, metadata: []string{"kind", "name"}},
		pb.ErrorReason_ERROR_REASON_AUTH_STATE:       {err: users.ErrLastAdministrator, code: codes.FailedPrecondition},
		pb.ErrorReason_ERROR_REASON_USER_LIMIT:       {err: &auth.LimitError{What: "requests a second", Limit: 1, Retry: 1}, code: codes.ResourceExhausted, metadata: []string{"what", "limit"}, retry: true},
	})
	documented := documentedCodes(t)
	if want := len(pb.ErrorReason_name) - 1; len(documented) != want {
		t.Errorf("docs/errors.md has %d reasons, the contract %d", len(documented), want)
	}
	for reason, r := range rows {
		if name := strings.TrimPrefix(reason.String(), "ERROR_REASON_"); documented[name] != r.code {
			t.Errorf("docs/errors.md: %s has code %v, the server sends %v", name, documented[name], r.code)
		}
	}
	for number, name := range pb.ErrorReason_name {
		reason := pb.ErrorReason(number)
		if reason == pb.ErrorReason_ERROR_REASON_UNSPECIFIED || reason >= pb.ErrorReason_ERROR_REASON_TYPE_ERROR && reason < pb.ErrorReason_ERROR_REASON_BULK_LOAD_BUSY {
			continue // those of transactions are tested with them
		}
		r, ok := rows[reason]
		if !ok {
			t.Errorf("%s has no row", name)
			continue
		}
		if r.err == nil {
			continue
		}
		if message := statusOf(r.err).Message(); packageName.MatchString(message) {
			t.Errorf("%s: the message begins with the name of a package: %q", name, message)
		}
		f := failureOf(t, statusOf(fmt.Errorf("wrapped: %w", r.err)).Err())
		f.want(t, r.code, reason, r.metadata...)
		if (f.field != "") != r.field || (f.retry > 0) != r.retry {
			t.Errorf("%s: field %q, retry %v", name, f.field, f.retry)
		}
	}
}

// packageName finds a package's name that begins a message.
var packageName = regexp.MustCompile("^(mvcc|feed|storage|wal|vfs|lease|batch|btree|pager|storeclock|transport|server|keys|cache): ")

var errorRow = regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\| ([A-Z_]+) \\|")

// documentedCodes is the code of each reason in docs/errors.md.
func documentedCodes(t *testing.T) map[string]codes.Code {
	t.Helper()
	text, err := os.ReadFile("../../docs/errors.md")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]codes.Code{}
	for _, match := range errorRow.FindAllStringSubmatch(string(text), -1) {
		var code codes.Code
		if err := code.UnmarshalJSON([]byte(strconv.Quote(match[2]))); err != nil {
			t.Errorf("docs/errors.md: %s: %v", match[1], err)
		}
		all[match[1]] = code
	}
	return all
}

func TestContextErrorsAreGRPCsOwn(t *testing.T) {
	for err, code := range map[error]codes.Code{context.Canceled: codes.Canceled, context.DeadlineExceeded: codes.DeadlineExceeded} {
		st := statusOf(fmt.Errorf("waiting: %w", err))
		if st.Code() != code || len(st.Details()) != 0 {
			t.Errorf("%v became %v with %v", err, st, st.Details())
		}
	}
	if st := statusOf(status.Error(codes.NotFound, "x")); st.Code() != codes.NotFound {
		t.Errorf("a status became %v", st)
	}
}

func TestUnknownMethodHasItsReason(t *testing.T) {
	h := mustStart(t)
	for _, method := range []string{"/epochkv.v1.KVService/Nothing", "/nobody.Nothing/Nothing"} {
		err := h.conn.Invoke(testContext(t), method, &pb.GetRequest{}, &pb.GetResponse{})
		failureOf(t, err).want(t, codes.Unimplemented, pb.ErrorReason_ERROR_REASON_UNIMPLEMENTED)
	}
}

func TestBadInputIsRefusedAndChangesNothing(t *testing.T) {
	h := mustStart(t)
	before := h.put(t, "k", "v")
	ctx := testContext(t)
	put := func(r *pb.PutRequest) error { _, err := h.kv.Put(ctx, r); return err }
	write := func(m ...*pb.Mutation) error {
		_, err := h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: m})
		return err
	}
	scan := func(r *pb.ScanRequest) error {
		stream, err := h.kv.Scan(ctx, r)
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	deleteRange := func(r *pb.DeleteRangeRequest) error { _, err := h.kv.DeleteRange(ctx, r); return err }
	get := func(r *pb.GetRequest) error { _, err := h.kv.Get(ctx, r); return err }
	x := []byte("x")
	for name, row := range map[string]struct {
		err    error
		reason pb.ErrorReason
		field  string
	}{
		"empty key":          {put(&pb.PutRequest{}), pb.ErrorReason_ERROR_REASON_KEY_EMPTY, "key"},
		"get empty key":      {get(&pb.GetRequest{}), pb.ErrorReason_ERROR_REASON_KEY_EMPTY, "key"},
		"durability":         {put(&pb.PutRequest{Key: x, Durability: 9}), pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "durability"},
		"no condition":       {put(&pb.PutRequest{Key: x, Preconditions: []*pb.Precondition{{Key: x}}}), pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "preconditions[0].condition"},
		"condition, no key":  {put(&pb.PutRequest{Key: x, Preconditions: []*pb.Precondition{{Condition: &pb.Precondition_Exists{}}}}), pb.ErrorReason_ERROR_REASON_KEY_EMPTY, "preconditions[0].key"},
		"empty batch":        {write(), pb.ErrorReason_ERROR_REASON_BATCH_EMPTY, "mutations"},
		"twice":              {write(&pb.Mutation{Kind: 1, Key: x}, &pb.Mutation{Kind: 2, Key: x}), pb.ErrorReason_ERROR_REASON_DUPLICATE_KEY, "mutations"},
		"kind":               {write(&pb.Mutation{Key: x}), pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "mutations[0].kind"},
		"delete with value":  {write(&pb.Mutation{Kind: 1, Key: x}, &pb.Mutation{Kind: 2, Key: []byte("y"), Value: x}), pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "mutations[1].value"},
		"prefix and start":   {scan(&pb.ScanRequest{Range: &pb.KeyRange{Prefix: x, Start: x}}), pb.ErrorReason_ERROR_REASON_INVALID_RANGE, "range"},
		"start behind end":   {scan(&pb.ScanRequest{Range: &pb.KeyRange{Start: []byte("b"), End: []byte("a")}}), pb.ErrorReason_ERROR_REASON_INVALID_RANGE, "range"},
		"range missing":      {deleteRange(&pb.DeleteRangeRequest{}), pb.ErrorReason_ERROR_REASON_INVALID_RANGE, "range"},
		"token":              {scan(&pb.ScanRequest{ResumeToken: x}), pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN, "resume_token"},
		"token and epoch":    {scan(&pb.ScanRequest{ResumeToken: appendToken(nil, token{epoch: 1, last: x, bounds: hashBounds(bounds{}), store: h.storeID}), SnapshotEpoch: 1}), pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "snapshot_epoch"},
		"token, other store": {scan(&pb.ScanRequest{ResumeToken: appendToken(nil, token{epoch: 1, last: x, bounds: hashBounds(bounds{}), store: h.storeID + 1})}), pb.ErrorReason_ERROR_REASON_FOREIGN_RESUME_TOKEN, "resume_token"},
		"token, other range": {scan(&pb.ScanRequest{ResumeToken: appendToken(nil, token{epoch: 1, last: x, store: h.storeID})}), pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN, "resume_token"},
	} {
		f := failureOf(t, row.err)
		if f.code != codes.InvalidArgument || f.reason != row.reason.Reason() || f.field != row.field {
			t.Errorf("%s: got %+v", name, f)
		}
	}
	failureOf(t, get(&pb.GetRequest{Key: x, SnapshotEpoch: 1 << 40})).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE, "epoch", "visible")
	if after := h.put(t, "k", "v"); after != before+1 {
		t.Errorf("epochs went from %d to %d: refused input took some", before, after)
	}
}

func TestOldEpochIsGone(t *testing.T) {
	h := mustStart(t)
	first := h.put(t, "k", "old")
	h.put(t, "k", "new")
	eventually(t, "min-visible moves", func() bool { return h.store.MinVisible() > 1 })
	_, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("k"), SnapshotEpoch: first})
	failureOf(t, err).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, "epoch", "oldest")
}

func TestSizesAtTheLimitAndOnePastIt(t *testing.T) {
	h := mustStart(t, func(c *config.Config) {
		c.Limits.ValueSize, c.Limits.BatchSize, c.Limits.BatchOps = 64*config.KiB, 256*config.KiB, 10
	})
	ctx := testContext(t)
	key := func(n int) []byte { return bytes.Repeat([]byte("k"), n) }
	if _, err := h.kv.Put(ctx, &pb.PutRequest{Key: key(2048), Value: key(64 << 10)}); err != nil {
		t.Errorf("at the limits: %v", err)
	}
	_, err := h.kv.Put(ctx, &pb.PutRequest{Key: key(2049)})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_KEY_TOO_LARGE, "limit", "size")
	_, err = h.kv.Get(ctx, &pb.GetRequest{Key: key(2049)})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_KEY_TOO_LARGE, "limit", "size")
	_, err = h.kv.Put(ctx, &pb.PutRequest{Key: key(1), Value: key(64<<10 + 1)})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_VALUE_TOO_LARGE, "limit", "size")

	mutations := func(n, size int) (out []*pb.Mutation) {
		for i := range n {
			out = append(out, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte(strconv.Itoa(i)), Value: key(size)})
		}
		return out
	}
	if _, err = h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: mutations(10, 1)}); err != nil {
		t.Errorf("ten operations: %v", err)
	}
	_, err = h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: mutations(11, 1)})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "limit", "size", "unit")
	_, err = h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: mutations(5, 60<<10)})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "limit", "size", "unit")

	if _, err = h.kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: repeated("0", 10)}); err != nil {
		t.Errorf("ten keys: %v", err)
	}
	_, err = h.kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: repeated("0", 11)})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "limit", "size", "unit")
	if _, err = h.kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: repeated(string(key(2048)), 5)}); err != nil {
		t.Errorf("an answer longer than a batch: %v", err)
	}
}

func repeated(key string, n int) (out [][]byte) {
	for range n {
		out = append(out, []byte(key))
	}
	return out
}
