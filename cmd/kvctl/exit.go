package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/restore"
	"github.com/epochkv/epochkv/internal/storage"
)

// Exit codes. They are part of the interface: scripts decide by them.
const (
	exitOK          = 0
	exitError       = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitConflict    = 4 // or a precondition that does not hold
	exitUnavailable = 6 // or a timeout
	exitLimit       = 7
	exitCorruption  = 8
	exitDenied      = 9 // no credentials, wrong ones, or a right is missing; at the server, or at the target of backups
	exitDiskFull    = 10
	exitHangup      = 129 // as shells say: 128 and the number of SIGHUP,
	exitInterrupted = 130 // of SIGINT,
	exitTerminated  = 143 // and of SIGTERM
)

// usageError is a command line that was not understood.
type usageError struct{ error }

// errNotFound ends a command that has already printed everything.
var errNotFound = errors.New("not found")

// errNotServing ends health.
var errNotServing = errors.New("the server is up but does not serve requests")

// report says on standard error what went wrong and what to do, and returns the exit code.
func (a *app) report(err error) int {
	if err == nil {
		return exitOK
	}
	if ended, ok := errors.AsType[commandError](err); ok { // the command has said why
		return ended.code
	}
	var said saidError
	if errors.As(err, &said) {
		return exitCode(err)
	}
	text, advice := err.Error(), a.advice(err)
	if errors.As(err, new(usageError)) {
		text = inOurWords(text)
	}
	if printsJSON(a.format) {
		a.reportJSON(err, text, advice)
		return exitCode(err)
	}
	_, _ = fmt.Fprintf(a.err, "kvctl: %s\n", printable(text))
	if advice != "" {
		_, _ = fmt.Fprintf(a.err, "       %s\n", advice)
	}
	return exitCode(err)
}

// reportedError is an error as JSON. Metadata have bytes as the server sends them: NAME, or NAME_base64.
type reportedError struct {
	Message  string            `json:"message"`
	Exit     int               `json:"exit"`
	Code     string            `json:"code,omitempty"`   // of gRPC
	Reason   string            `json:"reason,omitempty"` // docs/errors.md lists them
	Metadata map[string]string `json:"metadata,omitempty"`
	Advice   string            `json:"advice,omitempty"`
	Unknown  bool              `json:"outcome_unknown,omitempty"` // the write or the change may have happened
}

// reportJSON says what went wrong as one line of JSON on standard error.
func (a *app) reportJSON(err error, text, advice string) {
	r := reportedError{Message: text, Exit: exitCode(err), Advice: advice, Unknown: a.unknown(err) != ""}
	if e, ok := errors.AsType[*client.Error](err); ok {
		r.Code, r.Metadata = e.Code.String(), e.Metadata
		if e.Reason != kvpb.ErrorReason_ERROR_REASON_UNSPECIFIED {
			r.Reason = e.Reason.Reason()
		}
	}
	encoder := json.NewEncoder(a.err)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(struct { // nothing is left to report it to
		Error reportedError `json:"error"`
	}{r})
}

func exitCode(err error) int {
	var usage usageError
	var damage *storage.CorruptionError // of files that kvctl reads itself
	var e *client.Error
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usage):
		return exitUsage
	case restore.Unreachable(err): // also if the cause is that a backup is missing
		return exitCorruption
	case errors.Is(err, errNotFound), errors.Is(err, backup.ErrNoBackup):
		return exitNotFound
	case errors.Is(err, errDamaged), errors.As(err, &damage), errors.Is(err, backup.ErrDamaged), errors.Is(err, archive.ErrDamaged), errors.Is(err, restore.ErrDamaged):
		return exitCorruption
	case errors.Is(err, errNotServing):
		return exitUnavailable
	case errors.Is(err, objectstore.ErrDenied): // by the target of backups or of the archive, which kvctl reads itself
		return exitDenied
	case errors.Is(err, errNotApplied), errors.Is(err, errLockHeld), errors.Is(err, client.ErrLeaseLost):
		return exitConflict
	case errors.As(err, &e):
		return exitCodeOf(e)
	}
	return exitError
}

func exitCodeOf(e *client.Error) int {
	switch e.Reason {
	case kvpb.ErrorReason_ERROR_REASON_DISK_FULL:
		return exitDiskFull
	case kvpb.ErrorReason_ERROR_REASON_KEY_TOO_LARGE, kvpb.ErrorReason_ERROR_REASON_VALUE_TOO_LARGE,
		kvpb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, kvpb.ErrorReason_ERROR_REASON_TXN_TOO_LARGE:
		return exitLimit
	}
	switch e.Code {
	case codes.InvalidArgument:
		return exitUsage
	case codes.NotFound:
		return exitNotFound
	case codes.Aborted, codes.FailedPrecondition, codes.AlreadyExists:
		return exitConflict
	case codes.Unavailable, codes.DeadlineExceeded:
		return exitUnavailable
	case codes.ResourceExhausted:
		return exitLimit
	case codes.DataLoss:
		return exitCorruption
	case codes.Unauthenticated, codes.PermissionDenied:
		return exitDenied
	}
	return exitError
}

// singleWrites are the verbs that make one write, and fail only with it or before it.
var singleWrites = []string{"put", "del", "cas", "incr", "touch", "persist", "restore-key"}

// changes are the commands that change something else than keys with one request, and fail only with it or before it.
var changes = []string{
	"auth enable", "auth disable", "user bootstrap", "user create", "user update", "user delete", "user password", "role create", "role update", "role delete",
	"token create", "token revoke", "lease grant", "lease revoke", "holds take", "holds renew", "holds end", "backup create", "backup prune", "upgrade finalize",
}

// unknown is what may have happened although it has an error, because its answer was lost, or that of an attempt before: a write, a change, or
// nothing.
func (a *app) unknown(err error) string {
	e, ok := errors.AsType[*client.Error](err)
	switch {
	case !ok || !e.OutcomeUnknown():
		return ""
	case a.writing || a.verb != nil && slices.Contains(singleWrites, a.verb.Name()):
		return "write"
	case a.verb != nil && slices.Contains(changes, strings.TrimPrefix(a.verb.CommandPath(), "kvctl ")):
		return "change"
	}
	return ""
}

// advice is what the user can do about an error, or nothing.
func (a *app) advice(err error) string {
	advice, unknown := a.adviceAbout(err), a.unknown(err)
	e, ok := errors.AsType[*client.Error](err)
	switch {
	case ok && unknown == "change" && e.Reason == kvpb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN:
		return "The change may or may not have happened. Look at what there is once the server is healthy again."
	case !ok || unknown == "" || e.Code == codes.DeadlineExceeded || e.Reason == kvpb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN:
		return advice
	case e.Reason == kvpb.ErrorReason_ERROR_REASON_UNSPECIFIED && advice != "":
		return advice + " If an attempt had reached the server, the " + unknown + " may have happened."
	case unknown == "change":
		return "An attempt was not answered, so the change may or may not have happened. Look at what there is once the server is healthy again."
	}
	return "An attempt was not answered, so the write may or may not have happened. Read the key once the server is healthy again."
}

// adviceAbout is advice about an error, whatever became of a write.
func (a *app) adviceAbout(err error) string {
	var usage usageError
	var e *client.Error
	switch {
	case errors.As(err, &usage):
		return usageAdvice(a.verb)
	case errors.Is(err, errNotServing):
		return "The server is starting or shutting down, or it stopped writing after an I/O error. kvctl status shows which."
	case errors.Is(err, objectstore.ErrDenied):
		return "The target refuses the access. Credentials of S3 are taken from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the file of credentials."
	case !errors.As(err, &e):
		return ""
	}
	if text, ok := adviceByReason[e.Reason]; ok {
		return text
	}
	if e.Code == codes.Unavailable && e.Reason == kvpb.ErrorReason_ERROR_REASON_UNSPECIFIED {
		if text := a.portAdvice(e); text != "" {
			return text
		}
	}
	if text := e.TLSAdvice(); text != "" {
		return "The connection failed: " + text + "."
	}
	switch e.Code {
	case codes.Unavailable:
		return "Is the server running at " + a.endpoint + "? Set --endpoint or " + endpointEnv + " if it is elsewhere."
	case codes.DeadlineExceeded:
		if unknown := a.unknown(err); unknown != "" {
			return "The server did not answer in time; the " + unknown + " may or may not have happened. Try a longer --timeout."
		}
		return "The server did not answer in time. If the command writes, that may or may not have happened. Try a longer --timeout."
	case codes.Unimplemented:
		return "The server at " + a.endpoint + " does not know this request: is it an EpochKV server of this version?"
	}
	return ""
}

var adviceByReason = map[kvpb.ErrorReason]string{
	kvpb.ErrorReason_ERROR_REASON_KEY_TOO_LARGE:            "kvctl status shows the limits in force.",
	kvpb.ErrorReason_ERROR_REASON_VALUE_TOO_LARGE:          "kvctl status shows the limits in force.",
	kvpb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE:          "Use fewer or smaller entries per batch, or --limit for a range.",
	kvpb.ErrorReason_ERROR_REASON_DUPLICATE_KEY:            "Name each key once.",
	kvpb.ErrorReason_ERROR_REASON_CONFLICT:                 "Another client wrote the same keys at the same time. Run the command again.",
	kvpb.ErrorReason_ERROR_REASON_OVERLOADED:               "The server is busy. Try again, or send less at once.",
	kvpb.ErrorReason_ERROR_REASON_MEMORY_FULL:              "The server's memory budget is used up. Try again later, or raise its --memory.",
	kvpb.ErrorReason_ERROR_REASON_DISK_FULL:                "Free space on the server's disk; writes then go on by themselves.",
	kvpb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS:        "Close connections that are not needed, or try again later.",
	kvpb.ErrorReason_ERROR_REASON_TOO_MANY_SNAPSHOT_LEASES: "Too many scans keep a snapshot for their next page. Try again later.",
	kvpb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE:            "Read without --at, or raise the server's --retention.",
	kvpb.ErrorReason_ERROR_REASON_BACKUP_RUNNING:           "One backup is made at a time. kvctl backup status shows it.",
	kvpb.ErrorReason_ERROR_REASON_ARCHIVE_IN_USE:           "This is a copy of a store that another process archives there. kvctl archive status names it; use another --to for this one.",
	kvpb.ErrorReason_ERROR_REASON_HOLD_NOT_FOUND:           "The hold has ended. kvctl holds list shows those that exist.",
	kvpb.ErrorReason_ERROR_REASON_TOO_MANY_HOLDS:           "kvctl holds list shows them, kvctl holds end ends one.",
	kvpb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE:       "No commit has that epoch yet. kvctl status shows the newest visible epoch.",
	kvpb.ErrorReason_ERROR_REASON_CORRUPTION:               "Stored data is damaged. Keep a copy of the data directory before you do anything to it.",
	kvpb.ErrorReason_ERROR_REASON_SHUTTING_DOWN:            "The server is shutting down; nothing was written. Try again when it is back.",
	kvpb.ErrorReason_ERROR_REASON_READ_ONLY:                "The server stopped writing after an I/O error: see kvctl status and its log, then restart it.",
	kvpb.ErrorReason_ERROR_REASON_TXN_FAILED:               "Roll back the transaction, or roll back to an earlier savepoint.",
	kvpb.ErrorReason_ERROR_REASON_TXN_TOO_LARGE:            "Use several transactions, or raise the server's --max-txn-size.",
	kvpb.ErrorReason_ERROR_REASON_TXN_TIMEOUT:              "The server's --txn-idle-timeout and --txn-timeout say how long a transaction may take.",
	kvpb.ErrorReason_ERROR_REASON_TOO_MANY_TXNS:            "kvctl txn list shows them, kvctl txn end ends one.",
	kvpb.ErrorReason_ERROR_REASON_TXN_NOT_FOUND:            "The transaction has already ended. kvctl txn list shows open transactions.",
	kvpb.ErrorReason_ERROR_REASON_SNAPSHOT_NOT_FOUND:       "The snapshot has already ended. kvctl snapshots list shows open snapshots.",
	kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED:       "The write may have happened before. Read the keys to find out, then write under a new id.",
	kvpb.ErrorReason_ERROR_REASON_REQUEST_CANCELLED:        "The write did not happen: its outcome was asked for with a fence. Run the command again.",
	kvpb.ErrorReason_ERROR_REASON_CLOCK_EARLIER:            "The server's clock never goes back. It runs slower until it agrees with the system's time.",
	kvpb.ErrorReason_ERROR_REASON_TLS_NOT_CONFIGURED:       "Start the server with --tls-cert and --tls-key. kvctl tls init makes certificates for a trial.",
	kvpb.ErrorReason_ERROR_REASON_AUDIT_UNAVAILABLE:        "Make room on the disk of the server's audit log, or correct its permissions. The request was not executed.",
	kvpb.ErrorReason_ERROR_REASON_TLS_RELOAD_FAILED:        "Correct the file. New connections get the certificates that the server had before.",
	kvpb.ErrorReason_ERROR_REASON_CONFIG_RELOAD_FAILED:     "Correct the file. The server goes on with the options that it had before.",
	kvpb.ErrorReason_ERROR_REASON_UNAUTHENTICATED:          "kvctl login USER gets a token; --token-file, KVCTL_TOKEN or a context gives one that exists.",
	kvpb.ErrorReason_ERROR_REASON_TOKEN_EXPIRED:            "kvctl login USER gets a new token.",
	kvpb.ErrorReason_ERROR_REASON_PERMISSION_DENIED:        "kvctl auth status shows what you may do; an administrator can give your user a role that has the right.",
	kvpb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND:          "The lease has ended, and its keys and locks are gone. kvctl lease list shows those that exist.",
	kvpb.ErrorReason_ERROR_REASON_FENCED:                   "The lock was lost: acquire it again before the write.",
	kvpb.ErrorReason_ERROR_REASON_FEATURE_LEVEL:            "The data files are of an older program's format. kvctl upgrade finalize raises it; older programs cannot open them afterwards.",
	kvpb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN:          "The write may or may not have happened. Read the key once the server is healthy again.",
}
