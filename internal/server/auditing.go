package server

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// auditing is the server's part of the audit log: which requests have a line, and what is in it.
//
//	checked ─► noteRequest: user, footprint, room for the line ─► executed ─► Server.ended ─► writeAudit: one line
//
// Every request that ends has one line, because each of them calls Server.ended once. One that was refused before its check, for
// instance for overload, has no user and no keys in its line.
type auditing struct {
	log    *audit.Log // nil: there is none
	config config.Audit

	writes, reads bool // these classes are written
}

func (s *Server) openAudit() (err error) {
	c := &s.config.Audit
	au := &s.observer.audit
	if au.config = *c; c.File == "" {
		return nil
	}
	au.writes, au.reads = c.Wants(audit.ClassWrite), c.Wants(audit.ClassRead)
	au.log, err = audit.Open(audit.Options{
		Path: c.File, FileBytes: int64(c.FileSize), Files: c.Files, QueueBytes: int(c.QueueSize), Full: c.Full, Keys: c.Keys, Chain: c.Chain, Log: s.log.Logger,
	})
	return err
}

// wants reports whether the lines of a class are written. No class has none.
func (a *auditing) wants(c audit.Class) bool {
	switch c {
	case "":
		return false
	case audit.ClassWrite:
		return a.writes
	case audit.ClassRead:
		return a.reads
	case audit.ClassAuth, audit.ClassAdmin, audit.ClassDenied:
	}
	return true
}

// close ends the log with the server. Nothing that has a line happens afterwards.
func (a *auditing) close() error {
	if a.log == nil {
		return nil
	}
	return a.log.Close()
}

// auditNote is what the audit log says of a request that is being executed.
type auditNote struct {
	user     string
	reads    []string
	writes   []string
	more     int  // ranges beside these
	admitted int  // bytes of room for the line
	late     bool // the request lasts, and has given its room back; its line is written all the same
	executed bool // the request was not refused before it was executed
	denied   bool // the caller is not known, or lacks a right
	written  bool // a stream that is refused at a later message ends twice: its check says so, and its handler
	subject  string
}

// subjectBytesMax bounds the name of a user or role that a line is about.
const subjectBytesMax = 128

// noteRequest keeps what the audit log says of a request that was checked, and makes room for its line. refused is the result of
// the check, and of noteRequest unless the log refuses the request.
func (s *Server) noteRequest(ctx context.Context, a *access, class audit.Class, row *rpcRow, request any, refused error) (*auditNote, error) {
	au := &s.observer.audit
	if refused == nil && !au.wants(class) {
		return nil, nil
	}
	n := &auditNote{executed: refused == nil, denied: isDenial(refused)}
	n.user = a.userName()
	if class == audit.ClassAuth {
		n.user, n.subject = s.callerOfAuth(ctx), s.subjectOfAuth(request)
	}
	if row != nil && row.footprint != nil && request != nil {
		f := footprint{collect: func(right auth.Right, r auth.Range) { n.add(au.config.Keys, right, &r) }}
		row.footprint(&f, request)
	}
	line := audit.Event{User: n.user, Subject: n.subject, Reads: n.reads, Writes: n.writes}
	bytes := line.BytesMax(au.config.Keys)
	if err := au.log.Admit(ctx, connectionOf(ctx).client(), bytes); err != nil {
		n.executed = false
		if refused == nil {
			refused = err
		}
		return n, refused
	}
	if n.admitted = bytes; refused == nil && row != nil && row.lasts { // while it waits for a lock, for instance, others need the room
		n.giveBack(au.log)
	}
	return n, refused
}

// giveBack gives the room for the line back, because the request may last from now on. Its line is written all the same.
func (n *auditNote) giveBack(l *audit.Log) {
	if n != nil && n.admitted > 0 {
		l.Release(n.admitted)
		n.admitted, n.late = 0, true
	}
}

// bytes is the approximate size of the note.
func (n *auditNote) bytes() (all int) {
	if n == nil {
		return 0
	}
	for _, names := range [2][]string{n.reads, n.writes} {
		for _, name := range names {
			all += len(name)
		}
	}
	return all
}

// callerOfAuth is the user that sends a request to AuthService, which authenticates its clients itself; empty if it is not known.
func (s *Server) callerOfAuth(ctx context.Context) string {
	c, err := s.sender(ctx)
	if err != nil {
		return ""
	}
	return c.user.Name
}

// subjectOfAuth is the user or role that a request to AuthService is about. A login has it only if there is such a user: people
// type passwords in place of names.
func (s *Server) subjectOfAuth(request any) (name string) {
	switch r := request.(type) {
	case *pb.LoginRequest:
		if _, ok := s.gate.users.Table().Users[r.GetUser()]; ok {
			name = r.GetUser()
		}
	case interface{ GetUser() string }:
		name = r.GetUser()
	case interface{ GetRole() *pb.Role }:
		name = r.GetRole().GetName()
	case interface{ GetName() string }:
		name = r.GetName()
	}
	return name[:min(len(name), subjectBytesMax)]
}

// auditWatch writes the line of a watch when its rights are checked: its stream has any number of them.
func (s *Server) auditWatch(ctx context.Context, a *access, sw *streamWatch, refused error) error {
	start := s.clock.now()
	n, err := s.noteRequest(ctx, a, watchRow.class, watchRow, sw, refused)
	end := requestEnd{method: telemetry.MethodWatch, operation: "Create", start: start}
	if err != nil {
		end.code = statusOf(err).Code()
	}
	s.writeAudit(a.conn, &end, &details{note: n}, s.clock.now())
	return err
}

// auditRefusal writes the line of a request that was refused before it had a message: of the class of its method, or of `denied` if
// that was because of its caller. It waits for no room: the goroutine that reads the connection calls it.
func (s *Server) auditRefusal(peer, method string, class audit.Class, err error) {
	au := &s.observer.audit
	if au.log == nil || err == nil {
		return
	}
	if isDenial(err) {
		class = audit.ClassDenied
	}
	if !au.wants(class) {
		return
	}
	line := audit.Event{Time: time.Now(), Class: class, Peer: peer, Method: method, Code: statusOf(err).Code().String()}
	if denied, ok := errors.AsType[*auth.DeniedError](err); ok {
		line.User = denied.User
	}
	line.UnknownClient = isUnknown(&line)
	au.log.Write(&line, 0)
}

// auditStreamless is auditRefusal for the full name of a method, which the server may not have.
func (s *Server) auditStreamless(peer, path string, err error) {
	var class audit.Class
	if row := rpcRows[path]; row != nil {
		class = row.class
	}
	s.auditRefusal(peer, requestBase(path), class, err)
}

// isDenial reports whether a request was refused because of its caller, and not because of a limit.
func isDenial(err error) bool {
	return errors.Is(err, auth.ErrUnauthenticated) || errors.Is(err, auth.ErrTokenExpired) || errors.As(err, new(*auth.DeniedError))
}

func (n *auditNote) add(names audit.Keys, right auth.Right, r *auth.Range) {
	if len(n.reads)+len(n.writes) >= audit.RangesMax {
		n.more++
		return
	}
	name := names.Name(&audit.Range{Lower: r.Lower, Upper: r.Upper, Single: r.Single})
	switch {
	case name == "":
	case right == auth.RightRead:
		n.reads = append(n.reads, name)
	default:
		n.writes = append(n.writes, name)
	}
}

// endNote writes the line of a request whose outcome is known, if there is a note of it, before its answer waits for the client: the room of the line is
// needed by others. Server.ended does not write it again.
func (s *Server) endNote(conn *connection, e *requestEnd, d *details) {
	if d.note != nil {
		s.writeAudit(conn, e, d, s.clock.now())
	}
}

// writeAudit writes the line of a request that has ended, if it is of a class that is written.
func (s *Server) writeAudit(conn *connection, e *requestEnd, d *details, now time.Duration) {
	au := &s.observer.audit
	var n *auditNote
	if d != nil {
		n = d.note
	}
	if n == nil {
		n = new(auditNote)
	}
	if n.written {
		return
	}
	n.written = true
	class := e.class()
	if n.denied || e.code == codes.PermissionDenied || e.code == codes.Unauthenticated {
		class = audit.ClassDenied
	}
	if !au.wants(class) {
		au.log.Release(n.admitted)
		return
	}
	line := audit.Event{
		Time: time.Now(), Class: class, User: n.user, Subject: n.subject, Method: e.name(), Reads: n.reads, Writes: n.writes, More: n.more,
		Code: e.code.String(), Epoch: e.epoch, Took: now - e.start,
	}
	if conn != nil {
		line.Peer = conn.peer()
	}
	if class == audit.ClassWrite && n.executed && (e.code == codes.Internal || e.code == codes.Canceled || e.code == codes.DeadlineExceeded) {
		line.Code = "Unknown"
	}
	line.UnknownClient = isUnknown(&line)
	if n.late {
		au.log.WriteLate(&line)
		return
	}
	au.log.Write(&line, n.admitted)
}

// isUnknown reports whether a line is about a client that is not known, and that has got nothing by its request.
func isUnknown(line *audit.Event) bool {
	return line.User == "" && (line.Class == audit.ClassDenied || line.Class == audit.ClassAuth && (line.Code != codes.OK.String() || line.Method == telemetry.MethodWhoAmI.String()))
}

// class is the class of a request; empty if it has no line unless it is denied.
func (e *requestEnd) class() audit.Class {
	switch {
	case e.row != nil:
		return e.row.class
	case e.method == telemetry.MethodWatch && e.operation == "":
		return "" // each watch has a line
	case e.operation == "Create" || e.operation == "Get" || e.operation == "BatchGet" || e.operation == "Scan":
		return audit.ClassRead
	case e.operation != "":
		return "" // the commit has the line
	}
	return classOf(e.method)
}

// methodClasses has the classes of methods as the table of rights has them. Pipelines and transactions have none: their requests have.
var methodClasses = indexClasses()

func indexClasses() map[telemetry.Method]audit.Class {
	classes := map[telemetry.Method]audit.Class{telemetry.MethodCommit: audit.ClassWrite}
	for _, row := range rpcRows {
		if !row.rare {
			classes[row.counts] = row.class
		}
	}
	return classes
}

func classOf(m telemetry.Method) audit.Class { return methodClasses[m] }

// conditions are the condition that the audit log cannot be written.
func (a *auditing) conditions() []health.Condition {
	if a.log == nil {
		return nil
	}
	err := a.log.Err()
	if err == nil {
		return nil
	}
	c := health.Condition{Name: "audit-failing", Severity: health.Warning, Message: "the audit log cannot be written; lines are lost when its queue is full", Cause: err.Error()}
	if a.config.Full == audit.FullBlock {
		c.Severity, c.Message = health.Degraded, "the audit log cannot be written; requests that need a line in it are refused"
	}
	return []health.Condition{c}
}

// stats are the counts of the audit log.
func (a *auditing) stats() telemetry.AuditStats {
	if a.log == nil {
		return telemetry.AuditStats{}
	}
	s := a.log.Stats()
	return telemetry.AuditStats{Enabled: true, Written: s.Written, Dropped: s.Dropped, Errors: s.Errors, QueueBytes: s.QueueBytes}
}
