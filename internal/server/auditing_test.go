package server

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/auth/users"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/vfs"
)

// auditLine is a line as its readers see it.
type auditLine struct {
	Seq                                    uint64
	Class, User, Peer, Method, Code, Event string
	Subject                                string
	Reads, Writes                          []string
	Epoch                                  uint64
	Previous                               string
	Time                                   time.Time // of the end
	Took                                   int64     `json:"took_us"`
	text                                   string
}

// startAudited starts a server with an audit log, and returns what reads its lines after the server has ended, in the order in which the
// requests began: a client may have its answer, and send the next request, before a line is written.
func startAudited(t *testing.T, adjust ...func(*config.Config)) (h *harness, lines func() []auditLine) {
	return startAuditedOn(t, vfs.NewMem(), adjust...)
}

func startAuditedOn(t *testing.T, disk *vfs.Mem, adjust ...func(*config.Config)) (h *harness, lines func() []auditLine) {
	file := filepath.Join(t.TempDir(), "audit.log")
	h = mustStartUnchecked(t, disk, append([]func(*config.Config){func(c *config.Config) {
		c.Audit.File, c.Audit.Classes, c.Audit.Keys, c.Audit.Chain = file, "write", audit.KeysWhole, true
	}}, adjust...)...)
	return h, func() (all []auditLine) {
		t.Helper()
		_ = h.conn.Close()
		if err := h.stop(); err != nil {
			t.Fatal(err)
		}
		if _, err := audit.Verify([]string{file}); err != nil {
			t.Error(err)
		}
		if n := h.observer.audit.stats().QueueBytes; n != 0 {
			t.Errorf("requests that have ended keep %d bytes of room for lines", n)
		}
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		for s := bufio.NewScanner(f); s.Scan(); {
			l := auditLine{text: s.Text()}
			if err := json.Unmarshal(s.Bytes(), &l); err != nil {
				t.Fatal(err)
			}
			if l.Event == "" {
				all = append(all, l)
			}
		}
		began := func(l auditLine) time.Time { return l.Time.Add(-time.Duration(l.Took) * time.Microsecond) }
		slices.SortStableFunc(all, func(a, b auditLine) int { return began(a).Compare(began(b)) })
		return all
	}
}

// mustHaveOneLine fails unless exactly one line writes the key, and it says what is wanted.
func mustHaveOneLine(t *testing.T, all []auditLine, key, method, code string) {
	t.Helper()
	var found []auditLine
	for _, l := range all {
		if strings.Contains(strings.Join(l.Writes, " "), key) {
			found = append(found, l)
		}
	}
	if len(found) != 1 || found[0].Method != method || found[0].Code != code || found[0].Peer == "" || (code == "OK") != (found[0].Epoch > 0) {
		t.Errorf("%d lines write %q, want one %s with %s: %+v", len(found), key, method, code, found)
	}
	for _, l := range found {
		if strings.Contains(l.text, "secret") {
			t.Errorf("a line has a value: %s", l.text)
		}
	}
}

// TestEveryMutatingRequestHasOneLine: on both transports, alone, in a pipeline, in a transaction, one-shot or interactive,
// refused before and after its check.
func TestEveryMutatingRequestHasOneLine(t *testing.T) {
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.Full = audit.FullBlock })
	ctx := testContext(t)
	txns := pb.NewTransactionServiceClient(h.conn)
	secret := []byte("secret")
	put := func(key string) *pb.Mutation {
		return &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte(key), Value: secret}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k-put"), Value: secret})
	must(err)
	_, err = h.kv.Delete(ctx, &pb.DeleteRequest{Key: []byte("k-delete")})
	must(err)
	_, err = h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: []*pb.Mutation{put("k-batch"), put("k-other")}})
	must(err)
	_, err = h.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: &pb.KeyRange{Start: []byte("k-other"), End: []byte("k-other-end")}})
	must(err)
	_, err = txns.Execute(ctx, &pb.ExecuteRequest{ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Write{Write: put("k-execute")}}}})
	must(err)
	stream, err := txns.Transact(ctx)
	must(err)
	for _, req := range []*pb.TransactRequest{
		{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}},
		{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{put("k-txn")}}}},
		{Request: &pb.TransactRequest_Commit{Commit: &pb.CommitRequest{}}},
	} {
		must(stream.Send(req))
		_, err := stream.Recv()
		must(err)
	}
	must(stream.CloseSend())
	pipe := h.pipeline(t, ctx)
	for i := range 20 {
		must(pipe.Send(putRequest(uint64(i), fmt.Sprintf("k-pipe-%02d", i), "secret", 0)))
	}
	for range 20 {
		_, err := pipe.Recv()
		must(err)
	}
	must(pipe.CloseSend())
	_, err = h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k-failed"), Value: secret, Preconditions: []*pb.Precondition{{Key: []byte("k-failed"), Condition: &pb.Precondition_Exists{Exists: true}}}})
	if status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	h.get(t, "k-put")
	_, err = h.admin.Checkpoint(ctx, &pb.CheckpointRequest{})
	must(err)
	_, err = h.admin.ListTransactions(ctx, &pb.ListTransactionsRequest{})
	must(err)

	all := lines()
	for key, method := range map[string]string{
		"k-put": "Put", "k-delete": "Delete", "k-batch": "BatchWrite", "k-other..": "DeleteRange", "k-execute": "Execute", "k-txn": "Commit",
	} {
		mustHaveOneLine(t, all, key, method, "OK")
	}
	for i := range 20 {
		mustHaveOneLine(t, all, fmt.Sprintf("k-pipe-%02d", i), "Put", "OK")
	}
	mustHaveOneLine(t, all, "k-failed", "Put", "FailedPrecondition")
	if n := len(all); n != 6+20+1+1 { // and the checkpoint; no reads
		t.Errorf("%d lines: %+v", n, all)
	}
}

// TestRequestsThatEndEarlyHaveALine: by their deadline while they wait for the device, alone and in a pipeline that is cut off, it
// is unknown what became of them; one that was too late before it began was not executed.
func TestRequestsThatEndEarlyHaveALine(t *testing.T) {
	h, lines := startAudited(t)
	release := h.holdSyncs(t)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k-late"), Value: []byte("secret")})
	if status.Code(err) != codes.DeadlineExceeded {
		t.Fatal(err)
	}
	ctx, cut := context.WithCancel(testContext(t))
	pipe := h.pipeline(t, ctx)
	for i := range 3 {
		if err := pipe.Send(putRequest(uint64(i), fmt.Sprintf("k-cut-%d", i), "secret", 0)); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(10 * time.Second); h.store.Visible() < 4; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the puts were not executed")
		}
	}
	cut()
	if _, err := pipe.Recv(); err == nil {
		t.Fatal("an answer")
	}
	time.AfterFunc(100*time.Millisecond, release)
	all := lines()
	for _, key := range []string{"k-late", "k-cut-0", "k-cut-1", "k-cut-2"} {
		n := 0
		for _, l := range all {
			if strings.Join(l.Writes, "") == key && (l.Code == "Unknown" || key == "k-late" && l.Code == "OK" && l.Epoch > 0) { // the wait may be the sync itself
				n++
			}
		}
		if n != 1 {
			t.Errorf("%d lines say that it is unknown what became of %s: %+v", n, key, all)
		}
	}
	if len(all) != 4 {
		t.Errorf("%d lines: %+v", len(all), all)
	}
}

// TestRequestsWithoutAStreamHaveALine: of their class, without user and keys, on both transports.
func TestRequestsWithoutAStreamHaveALine(t *testing.T) {
	for _, kind := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(kind), func(t *testing.T) {
			h, lines := startAudited(t, func(c *config.Config) { c.Transport = kind })
			limit := h.receiving.streams.limit
			h.receiving.streams.reserved.Add(limit)
			for range config.StreamsOwn {
				if _, err := h.kv.Pipeline(testContext(t)); err != nil { // stays open
					t.Fatal(err)
				}
			}
			eventually(t, "all are open", func() bool { return h.counters.streams.Load() == config.StreamsOwn })
			_, put := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: []byte("secret")})
			_, get := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("k")})
			_, login := pb.NewAuthServiceClient(h.conn).Login(testContext(t), &pb.LoginRequest{User: "ann", Password: "secret"})
			for _, err := range []error{put, get, login} {
				failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
			}
			h.receiving.streams.reserved.Add(-limit)
			var got []string
			for _, l := range lines() {
				got = append(got, l.Class+" "+l.Method+" "+l.Code+l.User+strings.Join(l.Writes, ","))
			}
			if want := "write Put ResourceExhausted; auth Login ResourceExhausted"; strings.Join(got, "; ") != want {
				t.Errorf("%s, want %s", strings.Join(got, "; "), want)
			}
		})
	}
}

// TestReadsAndAdministrationAreClasses: reads have lines only if they are asked for, administration always.
func TestReadsAndAdministrationAreClasses(t *testing.T) {
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.Classes = "read" })
	h.put(t, "k", "secret")
	h.get(t, "k")
	if _, err := h.scanOnce(t, &pb.ScanRequest{Limit: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.admin.Checkpoint(testContext(t), &pb.CheckpointRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.admin.EndTransaction(testContext(t), &pb.EndTransactionRequest{Id: 7}); status.Code(err) != codes.NotFound {
		t.Fatal(err)
	}
	var got []string
	for _, l := range lines() {
		got = append(got, l.Class+" "+l.Method+" "+l.Code+strings.Join(l.Reads, ","))
	}
	if want := "read Get OKk; read Scan OK..; admin Checkpoint OK; admin EndTransaction NotFound"; strings.Join(got, "; ") != want {
		t.Errorf("%s, want %s", strings.Join(got, "; "), want)
	}
}

// TestDeniedRequestsHaveOneLineWithTheirUser: alone and in a pipeline, with the keys that were asked for, whatever the classes.
func TestDeniedRequestsHaveOneLineWithTheirUser(t *testing.T) {
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.Classes = "" })
	h.setUsers(map[string][]auth.Grant{"ann": {grant("rw", "ann/")}})
	ctx := metadata.AppendToOutgoingContext(testContext(t), "authorization", "Bearer ann")
	if _, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("ann/1"), Value: []byte("secret")}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("bob/put"), Value: []byte("secret")}); err == nil {
		t.Fatal(err)
	}
	pipe := h.pipeline(t, ctx)
	if err := pipe.Send(putRequest(1, "bob/pipe", "secret", 0)); err != nil {
		t.Fatal(err)
	}
	if out, err := pipe.Recv(); err != nil || out.GetError() == nil {
		t.Fatal(out, err)
	}
	if _, err := h.admin.ListTransactions(ctx, &pb.ListTransactionsRequest{}); err == nil {
		t.Fatal(err)
	}
	if _, err := h.admin.Checkpoint(ctx, &pb.CheckpointRequest{}); err == nil {
		t.Fatal(err)
	}
	if err := pipe.CloseSend(); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range lines() {
		got = append(got, strings.Join([]string{l.Class, l.User, l.Method, strings.Join(l.Writes, ",")}, " "))
		if strings.Contains(l.text, "secret") || strings.Contains(l.text, "Bearer") || l.Code == "OK" {
			t.Errorf("a line has a value or a token, or the wrong code: %s", l.text)
		}
	}
	want := "denied ann Put bob/put; denied ann Put bob/pipe; denied ann ListTransactions ; denied ann Checkpoint "
	if strings.Join(got, "; ") != want {
		t.Errorf("%s\nwant %s", strings.Join(got, "; "), want)
	}
}

// TestClientsThatAreNotKnownPushNoLineOut: their requests cost them nothing, with a token that is wrong or without any, and to AuthService as well. The
// lines of others are written.
func TestClientsThatAreNotKnownPushNoLineOut(t *testing.T) {
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.Classes = "" })
	h.setUsers(map[string][]auth.Grant{"ann": {grant("rw", "ann/")}})
	const most = 10_000
	who := pb.NewAuthServiceClient(h.conn)
	for name, send := range map[string]func(ctx context.Context) error{
		"Get": func(ctx context.Context) error {
			_, err := h.kv.Get(ctx, &pb.GetRequest{Key: []byte("k")})
			return err
		},
		"WhoAmI": func(ctx context.Context) error {
			_, err := who.WhoAmI(ctx, &pb.WhoAmIRequest{})
			return err
		},
	} {
		before := h.observer.audit.stats().Dropped
		for n := 0; h.observer.audit.stats().Dropped == before; n++ {
			if err := send(testContext(t)); n == most || err != nil && status.Code(err) != codes.Unauthenticated {
				t.Fatalf("%s: %d lines, %v", name, n, err)
			}
		}
	}
	if _, err := h.kv.Put(as(testContext(t), "ann"), &pb.PutRequest{Key: []byte("bob/1")}); status.Code(err) != codes.PermissionDenied {
		t.Fatal(err)
	}
	if all := lines(); all[len(all)-1].User != "ann" || all[len(all)-1].Class != string(audit.ClassDenied) {
		t.Errorf("the last line: %s", all[len(all)-1].text)
	}
}

// TestRefusedKeepAlivesHaveTheirUser in their line, also if they are refused before their rights are checked.
func TestRefusedKeepAlivesHaveTheirUser(t *testing.T) {
	h, lines := startAudited(t)
	limiter := auth.NewLimiter(auth.Limits{Streams: 1}, func() time.Duration { return 0 })
	h.setUsers(map[string][]auth.Grant{"ann": {grant("rwl", "ann/")}, "bob": {grant("rwl", "bob/")}}, func(table *auth.Table) {
		table.Users["bob"].Limiter = limiter
	})
	if err := limiter.Open(auth.Streams); err != nil {
		t.Fatal(err)
	}
	for _, user := range []string{"ann", "bob"} {
		stream, err := clientsOf(h.conn).lease.KeepAlive(as(testContext(t), user))
		if err != nil {
			t.Fatal(err)
		}
		ids := make([]uint64, leaseListMax*2)
		for i := range ids {
			ids[i] = 1 << 63
		}
		if err := stream.Send(&pb.KeepAliveRequest{Ids: ids}); err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err == nil {
			t.Fatal("not refused")
		}
	}
	users := map[string]bool{}
	for _, l := range lines() {
		if strings.Contains(l.Method, "KeepAlive") {
			users[l.User] = true
		}
	}
	if !users["ann"] || !users["bob"] || len(users) != 2 {
		t.Errorf("lines of the users %v", users)
	}
}

// Requests to the HTTP listener have a line if they are refused, with their user if it is known.
func TestRefusedHTTPRequestsHaveALine(t *testing.T) {
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.Classes = "" })
	h.setUsers(map[string][]auth.Grant{"ann": {grant("rw", "ann/")}, "observer": {action(auth.ActionObserve)}})
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for _, c := range []struct {
		path, header string
		want         int
	}{
		{"/metrics", "", http.StatusUnauthorized},
		{"/metrics", "Basic Ym9iOnNlY3JldA==", http.StatusUnauthorized}, // bob:secret
		{"/metrics", "Bearer ann", http.StatusForbidden},
		{"/metrics", "Bearer observer", http.StatusOK},
		{"/debug/pprof/cmdline", "Bearer observer", http.StatusForbidden},
		{"/healthz", "", http.StatusOK},
		{"/healthz", "Bearer secret", http.StatusOK},
		{"/healthz", "Basic Ym9iOnNlY3JldA==", http.StatusOK},
	} {
		r, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://"+h.HTTPAddress()+c.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if c.header != "" {
			r.Header.Set("Authorization", c.header)
		}
		answer, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		if _ = answer.Body.Close(); answer.StatusCode != c.want {
			t.Errorf("%s with %q: %d", c.path, c.header, answer.StatusCode)
		}
	}
	var got []string
	for _, l := range lines() {
		got = append(got, strings.Join([]string{l.Class, l.User, l.Method, l.Code}, " "))
		if strings.Contains(l.text, "secret") || strings.Contains(l.text, "Ym9i") || !strings.Contains(l.text, "127.0.0.1:") {
			t.Errorf("a line has credentials, or no peer: %s", l.text)
		}
	}
	want := []string{
		"denied  GET /metrics Unauthenticated", "denied  GET /metrics Unauthenticated", "denied ann GET /metrics PermissionDenied",
		"denied observer GET /debug/pprof/cmdline PermissionDenied", "denied  GET /healthz Unauthenticated",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

// TestBlockRefusesWhatCannotBeAudited: a write is refused before it is executed, and reads go on.
func TestBlockRefusesWhatCannotBeAudited(t *testing.T) {
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.Full, c.Audit.FileSize = audit.FullBlock, 64*config.KiB })
	dir := filepath.Dir(h.config.Audit.File)
	pipe := h.pipeline(t, testContext(t))
	key := strings.Repeat("k", 200)
	refused := func() bool {
		err := pipe.Send(putRequest(1, key, "v", pb.Durability_DURABILITY_ASYNC))
		if err != nil {
			t.Fatal(err)
		}
		out, err := pipe.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return out.GetError() != nil && strings.Contains(out.GetError().String(), "AUDIT_UNAVAILABLE")
	}
	if refused() {
		t.Fatal("refused at first")
	}
	if err := os.Rename(dir, dir+"-gone"); err != nil { // the next rotation fails
		t.Fatal(err)
	}
	deadline := time.Now().Add(20 * time.Second)
	for !refused() {
		if time.Now().After(deadline) {
			t.Fatal("not refused")
		}
	}
	before := h.store.Visible()
	if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k")}); status.Code(err) != codes.Unavailable || h.store.Visible() != before {
		t.Errorf("%v, and the epoch is %d after %d", err, h.store.Visible(), before)
	}
	h.get(t, "k")
	failing := func() bool {
		return slices.ContainsFunc(h.observe(), func(c health.Condition) bool { return c.Name == "audit-failing" })
	}
	if !failing() {
		t.Error("no condition")
	}
	if err := os.Rename(dir+"-gone", dir); err != nil {
		t.Fatal(err)
	}
	for failing() || refused() {
		if time.Now().After(deadline) {
			t.Fatal("refused for ever")
		}
		time.Sleep(time.Millisecond)
	}
	if err := pipe.CloseSend(); err != nil {
		t.Fatal(err)
	}
	_ = lines
}

// TestEveryMethodHasAClass: except those whose messages have one, and those of gRPC itself.
func TestEveryMethodHasAClass(t *testing.T) {
	for name, row := range rpcRows {
		switch {
		case name == pb.KVService_Pipeline_FullMethodName || name == pb.TransactionService_Transact_FullMethodName || !strings.HasPrefix(name, "/epochkv."):
			if row.class != "" {
				t.Errorf("%s has the class %s", name, row.class)
			}
		case strings.HasPrefix(name, "/epochkv.v1.AuthService/") != (row.class == audit.ClassAuth):
			t.Errorf("%s has the class %q", name, row.class)
		case row.class == "":
			t.Errorf("%s has no class", name)
		case !row.rare && classOf(row.counts) != row.class:
			t.Errorf("%s has the classes %q and %q", name, row.class, classOf(row.counts))
		}
	}
}

// callEmpty calls a method with an empty message, and waits for its end.
func (h *harness) callEmpty(t *testing.T, method string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	stream, err := h.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		t.Fatal(method, err)
	}
	var message any = new(emptypb.Empty)
	if method == pb.FeedService_Watch_FullMethodName {
		message = &pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{Ranges: []*pb.KeyRange{{}}}}}
	}
	_ = stream.SendMsg(message) // RecvMsg says why
	_ = stream.CloseSend()
	for err == nil {
		if err = stream.RecvMsg(new(emptypb.Empty)); path.Base(method) == "Watch" {
			cancel() // it has no end
		}
	}
}

// TestEveryMethodHasOneLine: with all classes, and room for lines that is given back.
func TestEveryMethodHasOneLine(t *testing.T) {
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.Classes, c.Audit.Full = "write,read", audit.FullBlock })
	want := map[string]audit.Class{}
	for name, row := range rpcRows {
		h.callEmpty(t, name)
		if row.class != "" {
			want[path.Base(name)] = row.class
		}
	}
	delete(want, "Watch") // each watch has a line
	want["Watch.Create"] = audit.ClassRead
	counts := map[string]int{}
	for _, l := range lines() {
		counts[l.Method]++
		if class := want[l.Method]; l.Class != string(class) && l.Class != string(audit.ClassDenied) {
			t.Errorf("class %q, want %q: %s", l.Class, class, l.text)
		}
	}
	for name := range want {
		if counts[name] != 1 {
			t.Errorf("%s has %d lines", name, counts[name])
		}
	}
	if len(counts) != len(want) {
		t.Errorf("lines of other methods: %v", counts)
	}
}

// TestLinesOfUsersHaveNoSecrets: of logins, also with a password in place of the name, and of changes by an administrator.
func TestLinesOfUsersHaveNoSecrets(t *testing.T) {
	passwordCost = users.HashCost{KiB: 8, Passes: 1, Threads: 1}
	t.Cleanup(func() { passwordCost = users.HashCost{} })
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.Classes = "" })
	client := pb.NewAuthServiceClient(h.conn)
	bootstrap := h.gate.users.BootstrapToken()
	_, err := client.Bootstrap(testContext(t), &pb.BootstrapRequest{Token: bootstrap, User: "ann", Password: "ann's secret"})
	must(t, err)
	out, err := client.Login(testContext(t), &pb.LoginRequest{User: "ann", Password: "ann's secret"})
	must(t, err)
	ann := out.GetToken()
	_, err = client.CreateRole(with(t, ann), &pb.CreateRoleRequest{Role: &pb.Role{Name: "reader", Grants: []*pb.KeyGrant{{Read: true}}}})
	must(t, err)
	_, err = client.CreateUser(with(t, ann), &pb.CreateUserRequest{Name: "bob", Password: "bob's secret", Roles: []string{"reader"}})
	must(t, err)
	_, err = client.Enable(with(t, ann), &pb.EnableRequest{})
	must(t, err)
	for _, name := range []string{"bob", "bob's secret"} {
		if _, err := client.Login(testContext(t), &pb.LoginRequest{User: name, Password: "wrong secret"}); err == nil {
			t.Fatal("a login with a wrong password")
		}
	}
	if _, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("k")}); status.Code(err) != codes.Unauthenticated {
		t.Fatal(err)
	}
	if _, err := h.kv.Get(with(t, "wrong secret"), &pb.GetRequest{Key: []byte("k")}); status.Code(err) != codes.Unauthenticated {
		t.Fatal(err)
	}
	var got []string
	for _, l := range lines() {
		got = append(got, strings.Join([]string{l.Class, l.User, l.Method, l.Subject, l.Code}, " "))
		if strings.Contains(l.text, "secret") || strings.Contains(l.text, ann) || strings.Contains(l.text, bootstrap) {
			t.Errorf("a line has a secret: %s", l.text)
		}
	}
	want := []string{
		"auth  Bootstrap ann OK", "auth  Login ann OK", "auth ann CreateRole reader OK", "auth ann CreateUser bob OK", "auth ann Enable  OK",
		"denied  Login bob Unauthenticated", "denied  Login  Unauthenticated", "denied  Get  Unauthenticated", "denied  Get  Unauthenticated",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestDeniedMessagesOfStreamsHaveOneLine: the second message of a bulk load, a watch beside others, and paths of the HTTP listener.
func TestDeniedMessagesOfStreamsHaveOneLine(t *testing.T) {
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.Classes, c.Audit.Full = "write", audit.FullBlock })
	h.setUsers(map[string][]auth.Grant{"ann": {grant("rw", "ann/")}})
	load, err := h.kv.BulkLoad(with(t, "ann"))
	must(t, err)
	for _, key := range []string{"ann/1", "bob/1"} {
		must(t, load.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte(key)}}}))
	}
	if _, err := load.CloseAndRecv(); status.Code(err) != codes.PermissionDenied {
		t.Fatal(err)
	}
	watch, err := pb.NewFeedServiceClient(h.conn).Watch(with(t, "ann"))
	must(t, err)
	must(t, watch.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: 1, Ranges: []*pb.KeyRange{{Start: []byte("bob/"), End: []byte("bob0")}}}}}))
	_, err = watch.Recv()
	must(t, err)
	must(t, watch.CloseSend())
	var got []string
	for _, l := range lines() {
		got = append(got, strings.Join([]string{l.Class, l.User, l.Method, strings.Join(append(l.Reads, l.Writes...), ",")}, " "))
	}
	if want := []string{"denied ann BulkLoad ann/1", "denied ann Watch.Create bob/..bob0"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestFullQueueDelaysOnlyItsConnection: a write waits for room as long as its context allows, other connections are served, and
// the server ends.
func TestFullQueueDelaysOnlyItsConnection(t *testing.T) {
	inTimeOf(t, 50*time.Millisecond, func(timeout time.Duration) error { return fullQueueDelaysOnlyItsConnection(t, timeout) })
}

// fullQueueDelaysOnlyItsConnection returns an error if the server has not seen the write that is late, whose time may end on its way.
func fullQueueDelaysOnlyItsConnection(t *testing.T, timeout time.Duration) error {
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.Full = audit.FullBlock })
	log, size := h.observer.audit.log, int(h.config.Audit.QueueSize)
	must(t, log.Admit(t.Context(), nil, size))
	waits := make(chan error, 1)
	go func() {
		_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k-waits")})
		waits <- err
	}()
	other := pb.NewKVServiceClient(h.dial(t))
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	if _, err := other.Put(ctx, &pb.PutRequest{Key: []byte("k-late")}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a write without room: %v", err)
	}
	if out, err := other.Get(testContext(t), &pb.GetRequest{Key: []byte("k-late")}); err != nil || out.GetFound() {
		t.Errorf("a read of a connection whose write was not executed: %v, %v", out, err)
	}
	select {
	case err := <-waits:
		t.Errorf("a write without room has ended: %v", err)
	default:
	}
	log.Release(size)
	must(t, <-waits)
	found := map[string]int{}
	for _, l := range lines() {
		found[strings.Join(l.Writes, "")]++
	}
	// The server may learn that the late write was given up only when there is room again: then it has a line.
	s := h.observer.audit.stats()
	if found["k-waits"] == 1 && found["k-late"]+int(s.Dropped) == 0 {
		return errors.New("the late write has no line, and none was dropped")
	}
	if found["k-waits"] != 1 || found["k-late"]+int(s.Dropped) != 1 {
		t.Errorf("lines: %v, %d dropped; want one of the write that waited, and one, or one dropped, of that which was late", found, s.Dropped)
	}
	return nil
}

// TestDroppedLinesKeepTheQueueInItsBound: with --audit-full drop, lines of requests that were checked find room as the others do. While
// the file cannot be written, here because it cannot be renamed, each of them was kept in memory.
func TestDroppedLinesKeepTheQueueInItsBound(t *testing.T) {
	h, lines := startAudited(t, func(c *config.Config) { c.Audit.FileSize, c.Audit.QueueSize = 64*config.KiB, 64*config.KiB })
	inTheWay := filepath.Join(fmt.Sprintf("%s.%020d", h.config.Audit.File, 1), "x")
	must(t, os.MkdirAll(inTheWay, 0o700))
	ctx, key := testContext(t), strings.Repeat("k", 256)
	for queued := 0; h.observer.audit.stats().Dropped < 100; queued++ {
		_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte(key), Durability: pb.Durability_DURABILITY_ASYNC})
		must(t, err)
		if s := h.observer.audit.stats(); s.QueueBytes > int(h.config.Audit.QueueSize) {
			t.Fatalf("after %d requests: %+v", queued, s)
		}
	}
	must(t, os.RemoveAll(filepath.Dir(inTheWay)))
	eventually(t, "lines are written again", func() bool { return h.observer.audit.stats().QueueBytes == 0 })
	lines()
}
