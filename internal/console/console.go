// Package console serves the console: pages in a browser that show the state of a server, and let an operator look at
// keys.
//
//	browser ──GET──► assets (embedded; they name no other host)
//	        ──POST─► api/call/SERVICE/METHOD ──► Options.Call ──► the checks and handlers of every request
//	        ──GET──► api/samples ──────────────► the last hour, one sample every SampleEvery
//	        ──POST─► login, logout ────────────► a token in a cookie that scripts cannot read
//
// The console has no rights of its own. Each request for data is a request of the API, in JSON, on behalf of the caller: it is
// admitted, checked, counted and audited like one that comes by gRPC. The samples are given to callers that may read Status.
// Only the methods in the tables reads and changes can be called, and those in changes only if Options.Changes is set.
//
// What a hostile page in the same browser must not be able to do: read (answers need the header of fromConsole, which a form or a
// link cannot send, and no other origin is allowed by CORS); call with the cookie (SameSite=Strict, and Sec-Fetch-Site must not be
// cross-site); reach a server on loopback through a name that it makes resolve to 127.0.0.1 (while users are not checked, Host must be
// an address, localhost or a name in Options.Hosts); run scripts (the content security policy allows the embedded ones).
//
// The package knows neither the store nor gRPC's transports.
package console

import (
	"embed"
	"errors"
	"io"
	"io/fs"
	"mime"
	"net"
	"net/http"
	"path"
	"slices"
	"strings"
)

// Root is the path of the console.
const Root = "/console/"

// messageBytesMax bounds a request in JSON: a key, in base64, and numbers.
const messageBytesMax = 256 << 10

//go:embed assets
var embedded embed.FS

// Options are what the console shows, and how it gets it.
type Options struct {
	// Call calls a method of the API on behalf of the caller of r, with a message and an answer in JSON. Its errors are *CallError.
	Call func(r *http.Request, method string, message []byte) ([]byte, error)
	// Checked reports whether users are checked.
	Checked func() bool
	// Samples are the samples of the last hour.
	Samples *Samples
	// Changes allows the methods in changes.
	Changes bool
	// Hosts are names by which browsers reach the server, besides addresses and localhost.
	Hosts []string
}

// CallError is the answer to a call that failed.
type CallError struct {
	Status  int    `json:"-"`      // of HTTP
	Code    string `json:"code"`   // of gRPC
	Reason  string `json:"reason"` // may be empty
	Message string `json:"message"`
}

func (e *CallError) Error() string { return e.Message }

// reads are the methods that change nothing.
var reads = []string{
	"epochkv.v1.AdminService/Status",
	"epochkv.v1.AdminService/Space",
	"epochkv.v1.AdminService/ListTransactions",
	"epochkv.v1.AdminService/ListSnapshots",
	"epochkv.v1.AdminService/ListWatches",
	"epochkv.v1.AdminService/ListHolds",
	"epochkv.v1.AdminService/SlowRequests",
	"epochkv.v1.AdminService/ArchiveStatus",
	"epochkv.v1.AdminService/GetConfig",
	"epochkv.v1.AuthService/WhoAmI",
	"epochkv.v1.AuthService/ListUsers",
	"epochkv.v1.AuthService/ListRoles",
	"epochkv.v1.AuthService/ListTokens",
	"epochkv.v1.BackupService/GetBackupStatus",
	"epochkv.v1.FeedService/History",
	"epochkv.v1.KVService/Get",
	"epochkv.v1.KVService/Scan",
	"epochkv.v1.LeaseService/ListLeases",
	"epochkv.v1.LeaseService/GetLease",
	"epochkv.v1.LockService/GetLock",
	"epochkv.v1.LockService/ListLocks",
}

// changes are the methods by which an operator ends what holds up others, and takes access from users.
var changes = []string{
	"epochkv.v1.AdminService/EndTransaction",
	"epochkv.v1.AdminService/EndSnapshot",
	"epochkv.v1.AdminService/EndWatch",
	"epochkv.v1.AdminService/EndHold",
	"epochkv.v1.LeaseService/RevokeLease",
	"epochkv.v1.LockService/ReleaseLock",
	"epochkv.v1.AuthService/UpdateUser",
	"epochkv.v1.AuthService/RevokeToken",
}

// Methods are the methods that pages call: those that change nothing, and the others.
func Methods() (unchanging, changing []string) { return slices.Clone(reads), slices.Clone(changes) }

// policy lets a page run the embedded scripts and styles, and talk to the server that it came from, and nothing else.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// Handler serves the console under Root.
func Handler(o Options) http.Handler {
	assets, err := fs.Sub(embedded, "assets")
	if err != nil {
		panic(err) // the directory is embedded
	}
	c := &console{Options: o, assets: assets}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+Root, c.asset)
	mux.HandleFunc("GET "+Root+"api/samples", c.guarded(c.samples))
	mux.HandleFunc("GET "+Root+"api/about", c.guarded(c.about))
	mux.HandleFunc("POST "+Root+"api/call/{service}/{method}", c.guarded(c.call))
	mux.HandleFunc("POST "+Root+"api/login", c.guarded(c.login))
	mux.HandleFunc("POST "+Root+"api/logout", c.guarded(c.logout))
	return mux
}

type console struct {
	Options
	assets fs.FS
}

// asset serves an embedded file. They are never stored by a cache, so that a page fits the server that it talks to.
func (c *console) asset(w http.ResponseWriter, r *http.Request) {
	name := strings.TrimPrefix(r.URL.Path, Root)
	if name == "" {
		name = "index.html"
	}
	content, err := fs.ReadFile(c.assets, name)
	if err != nil {
		http.NotFound(w, r)
		return
	}
	h := w.Header()
	h.Set("Content-Type", mime.TypeByExtension(path.Ext(name)))
	h.Set("Content-Security-Policy", policy)
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-cache")
	_, _ = w.Write(content) // an error means that the browser has disconnected
}

// fromConsole is a header that pages of the console send, and that no other page can send to this server without its consent.
const fromConsole = "X-Epochkv-Console"

// guarded lets requests of the console's own pages through.
func (c *console) guarded(next func(http.ResponseWriter, *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		err := c.check(r)
		if err == nil {
			err = next(w, r)
		}
		if err != nil {
			answerError(w, err)
		}
	}
}

func (c *console) check(r *http.Request) error {
	site := r.Header.Get("Sec-Fetch-Site")
	switch {
	case r.Header.Get(fromConsole) == "" || site != "" && site != "same-origin":
		return &CallError{Status: http.StatusForbidden, Code: "PermissionDenied", Message: "the request does not come from a page of the console"}
	case !c.Checked() && !c.isOwnHost(r.Host):
		return &CallError{
			Status: http.StatusForbidden, Code: "PermissionDenied",
			Message: "while users are not checked, the console is reached by an address or as localhost, not by another name",
		}
	}
	return nil
}

func (c *console) isOwnHost(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.Trim(host, "[]")
	return net.ParseIP(host) != nil || host == "localhost" || slices.Contains(c.Hosts, host)
}

// call calls a method of the API.
func (c *console) call(w http.ResponseWriter, r *http.Request) error {
	method := r.PathValue("service") + "/" + r.PathValue("method")
	switch {
	case slices.Contains(reads, method):
	case !slices.Contains(changes, method):
		return &CallError{Status: http.StatusNotFound, Code: "Unimplemented", Message: "the console does not call " + method}
	case !c.Changes:
		return &CallError{
			Status: http.StatusForbidden, Code: "PermissionDenied",
			Message: "the console is read-only; start the server with --console=full, or use kvctl",
		}
	}
	message, err := io.ReadAll(http.MaxBytesReader(w, r.Body, messageBytesMax))
	if err != nil {
		return &CallError{Status: http.StatusBadRequest, Code: "InvalidArgument", Message: err.Error()}
	}
	answer, err := c.Call(r, method, message)
	if err != nil {
		return err
	}
	return answerJSON(w, answer)
}

// samples answers callers that may read Status.
func (c *console) samples(w http.ResponseWriter, r *http.Request) error {
	if _, err := c.Call(r, "epochkv.v1.AdminService/Status", []byte("{}")); err != nil {
		return err
	}
	return answerJSON(w, c.Samples.JSON())
}

func answerJSON(w http.ResponseWriter, body []byte) error {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) // an error means that the browser has disconnected
	return nil
}

func answerError(w http.ResponseWriter, err error) {
	var e *CallError
	if !errors.As(err, &e) {
		e = &CallError{Status: http.StatusInternalServerError, Code: "Internal", Message: err.Error()}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.Status)
	_, _ = w.Write(e.json())
}
