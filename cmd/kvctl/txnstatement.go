package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// A statement is a line of a transaction's script or of the shell: a verb and its words, such as `put greeting "hello world"`.
// Spaces separate words. 'single quotes' take everything literally, "double quotes" know Go's escapes, and # begins
// a comment.

// errQuotes is a line whose quotes do not match, and errGlued one in which a word goes on after its quotes: shells make one word of both.
var (
	errQuotes = errors.New("a quote is not closed")
	errGlued  = errors.New("a space is missing after a quote; a word is quoted as a whole")
)

// splitStatement splits a line into words. A comment or an empty line has none.
func splitStatement(line string) ([]string, error) {
	var words []string
	for rest := strings.TrimSpace(line); rest != "" && rest[0] != '#'; rest = strings.TrimSpace(rest) {
		var word string
		switch rest[0] {
		case '\'':
			end := strings.IndexByte(rest[1:], '\'')
			if end < 0 {
				return nil, errQuotes
			}
			if word, rest = rest[1:1+end], rest[end+2:]; !startsApart(rest) {
				return nil, errGlued
			}
		case '"':
			quoted, err := strconv.QuotedPrefix(rest)
			if err != nil {
				return nil, errQuotes
			}
			if word, err = strconv.Unquote(quoted); err != nil {
				return nil, err
			}
			if rest = rest[len(quoted):]; !startsApart(rest) {
				return nil, errGlued
			}
		default:
			end := strings.IndexAny(rest, " \t")
			if end < 0 {
				end = len(rest)
			}
			word, rest = rest[:end], rest[end:]
		}
		words = append(words, word)
	}
	return words, nil
}

// startsApart reports whether the rest of a line does not continue the word before it.
func startsApart(rest string) bool {
	return rest == "" || rest[0] == ' ' || rest[0] == '\t' || rest[0] == '\n' || rest[0] == '\r'
}

// verb is the first word of a statement.
type verb struct {
	usage    string
	about    string
	min, max int  // words after the verb; max -1: any number
	keys     bool // its words are keys, or begin with one: for completion
	shell    bool // not in scripts
	run      func(s *statements, words []string) error
}

// verbs by name. It is filled by init, because help lists it.
var verbs map[string]verb

func init() {
	verbs = map[string]verb{
		"get":        {"get KEY...", "read keys", 1, -1, true, false, (*statements).get},
		"put":        {"put KEY VALUE", "set a key", 2, 2, true, false, (*statements).put},
		"del":        {"del KEY...", "remove keys", 1, -1, true, false, (*statements).del},
		"scan":       {"scan [PREFIX] [limit N] [reverse]", "list entries in key order", 0, 4, true, false, (*statements).scan},
		"delrange":   {"delrange START END", "remove the keys from START to before END", 2, 2, true, false, (*statements).deleteRange},
		"incr":       {"incr KEY [DELTA]", "add to an integer", 1, 2, true, false, (*statements).increment},
		"append":     {"append KEY SUFFIX", "add to the end of a value", 2, 2, true, false, (*statements).append},
		"cas":        {"cas KEY OLD NEW", "set a key that has the value OLD", 3, 3, true, false, (*statements).compareAndSet},
		"savepoint":  {"savepoint NAME", "name the state of the transaction", 1, 1, false, false, (*statements).savepoint},
		"rollback":   {"rollback [to NAME]", "undo the transaction, or what came after a savepoint", 0, 2, false, false, (*statements).rollback},
		"commit":     {"commit", "end the transaction", 0, 0, false, false, (*statements).commit},
		"begin":      {"begin [snapshot] [readonly] [at EPOCH|TIME]", "open a transaction; serializable unless it says snapshot", 0, 4, false, true, (*statements).begin},
		"at":         {"at EPOCH|TIME|now", "read an earlier state from here on: " + momentForms, 1, 1, false, true, (*statements).setAt},
		"status":     {"status", "the state of the server", 0, 0, false, true, (*statements).status},
		"conditions": {"conditions", "the active conditions of the server", 0, 0, false, true, (*statements).conditions},
		"watch":      {"watch [PREFIX] [limit N]", "print changes as they are committed, until Ctrl-C; after the state of at, if one is given", 0, 3, true, true, (*statements).watch},
		"help":       {"help", "this list", 0, 0, false, true, (*statements).help},
	}
}

// statements runs statements in order, in the open transaction if there is one.
type statements struct {
	// Constant.
	app    *app
	ctx    context.Context
	client *client.Client
	script bool // one transaction that the caller has begun

	tx         *client.Txn        // nil: none is open
	endTx      context.CancelFunc // breaks its stream
	wrote      bool               // a statement of tx writes
	savepoints map[string]uint64
	at         past // outside transactions
}

// errNoTransaction and errInTransaction are statements in the wrong place.
var (
	errNoTransaction = usageError{errors.New("no transaction is open; start one with begin")}
	errInTransaction = usageError{errors.New("a transaction is open; commit or rollback first")}
	errReadingPast   = usageError{errors.New("the shell reads an earlier state; type `at now` before you write")}
)

// errNotApplied ends a comparison that did not hold.
var errNotApplied = errors.New("the key does not have the expected value; nothing was written")

// execute runs one line. Empty lines and comments do nothing.
func (s *statements) execute(line string) error {
	words, err := splitStatement(line)
	if err != nil || len(words) == 0 {
		if err != nil {
			err = usageError{err}
		}
		return err
	}
	v, ok := verbs[words[0]]
	if !ok || v.shell && s.script {
		return usageError{fmt.Errorf("unknown statement %q; expected one of %s", words[0], strings.Join(s.names(), ", "))}
	}
	if n := len(words) - 1; n < v.min || v.max >= 0 && n > v.max {
		return usageError{fmt.Errorf("usage: %s", v.usage)}
	}
	s.app.writing = false
	if s.tx == nil || words[0] == "scan" { // which takes as long as its output is taken
		return v.run(s, words[1:])
	}
	return s.within(func() error { return v.run(s, words[1:]) })
}

// names lists the verbs that may be used here.
func (s *statements) names() []string {
	var names []string
	for _, name := range verbOrder {
		if !s.script || !verbs[name].shell {
			names = append(names, name)
		}
	}
	return names
}

// verbOrder is the order of help.
var verbOrder = []string{
	"get", "put", "del", "scan", "delrange", "incr", "append", "cas", "begin", "savepoint", "rollback", "commit", "at",
	"status", "conditions", "watch", "help",
}

func (s *statements) get(words []string) error {
	keys, err := s.app.bytesArgs(words)
	if err != nil {
		return err
	}
	var values []client.Value
	if s.tx != nil {
		values, err = s.tx.BatchGet(keys)
	} else {
		values, err = s.client.BatchGet(s.ctx, keys, s.at.option())
	}
	if err != nil {
		return err
	}
	for i, v := range values {
		if err := s.app.printFound(keys[i], v); err != nil {
			return err
		}
	}
	return nil
}

func (s *statements) put(words []string) error {
	pair, err := s.app.bytesArgs(words)
	if err != nil {
		return err
	}
	return s.write(
		func() error { return s.tx.Put(pair[0], pair[1]) },
		func() (client.Epoch, error) { return s.client.Put(s.ctx, pair[0], pair[1]) })
}

func (s *statements) del(words []string) error {
	keys, err := s.app.bytesArgs(words)
	if err != nil {
		return err
	}
	var b client.Batch
	for _, key := range keys {
		b.Delete(key)
	}
	return s.write(
		func() error {
			for _, key := range keys {
				if err := s.tx.Delete(key); err != nil {
					return err
				}
			}
			return nil
		},
		func() (client.Epoch, error) { return s.client.Write(s.ctx, &b) })
}

// write writes inside the transaction, or outside of any.
func (s *statements) write(inside func() error, outside func() (client.Epoch, error)) error {
	if s.tx != nil {
		s.wrote = true
		if err := inside(); err != nil {
			return err
		}
		if !s.script { // a person wants to know at once
			if err := s.tx.Flush(); err != nil {
				return err
			}
		}
		return s.app.done(0)
	}
	if s.at != (past{}) {
		return errReadingPast
	}
	s.app.writing = true
	epoch, err := outside()
	if err != nil {
		return err
	}
	s.app.writing = false
	return s.app.done(epoch)
}

func (s *statements) scan(words []string) error {
	var r client.Range
	o := client.ScanOptions{At: s.at.epoch, AtTime: s.at.time}
	for i := 0; i < len(words); i++ {
		switch {
		case words[i] == "reverse":
			o.Reverse = true
		case words[i] == "limit" && i+1 < len(words):
			n, err := strconv.ParseUint(words[i+1], 10, 64)
			if err != nil {
				return usageError{fmt.Errorf("limit %q: expected a number", words[i+1])}
			}
			o.Limit = n
			i++
		case i == 0:
			prefix, err := s.app.bytesArg(words[i])
			if err != nil {
				return err
			}
			r = client.Prefix(prefix)
		default:
			return usageError{fmt.Errorf("usage: %s", verbs["scan"].usage)}
		}
	}
	entries := s.client.Scan(s.ctx, r, o)
	if s.tx != nil {
		entries = s.tx.Scan(r, o)
	}
	p := s.app.newEntryPrinter(false)
	for e, err := range entries {
		if err != nil {
			return errors.Join(err, p.w.Flush())
		}
		if err := p.print(e); err != nil {
			return err
		}
	}
	return p.close()
}

func (s *statements) deleteRange(words []string) error {
	ends, err := s.app.bytesArgs(words)
	if err != nil {
		return err
	}
	for i, name := range []string{"START", "END"} {
		if len(ends[i]) == 0 { // nearly always a variable that is not set: all keys on that side would be deleted
			return usageError{fmt.Errorf("delrange: %s is empty; \"\\x00\" is before all keys, \"\\xff\\xff\" after all that are text", name)}
		}
	}
	r := client.Between(ends[0], ends[1])
	var n uint64
	err = s.write(
		func() (err error) {
			n, err = s.tx.DeleteRange(r)
			return err
		},
		func() (client.Epoch, error) {
			out, err := s.client.DeleteRange(s.ctx, r, 0)
			n = out.Count
			return out.Epoch, err
		})
	if err == nil && s.app.formatOr(formatJSONL) == formatTable {
		err = s.app.print("%d deleted\n", n)
	}
	return err
}

func (s *statements) increment(words []string) error {
	delta := int64(1)
	if len(words) == 2 {
		var err error
		if delta, err = strconv.ParseInt(words[1], 10, 64); err != nil {
			return usageError{fmt.Errorf("%q: expected an integer", words[1])}
		}
	}
	key, err := s.app.bytesArg(words[0])
	if err != nil {
		return err
	}
	return s.invoke(key, client.Increment(key, delta))
}

func (s *statements) append(words []string) error {
	pair, err := s.app.bytesArgs(words)
	if err != nil {
		return err
	}
	return s.invoke(pair[0], client.Append(pair[0], pair[1]))
}

func (s *statements) compareAndSet(words []string) error {
	w, err := s.app.bytesArgs(words)
	if err != nil {
		return err
	}
	return s.invoke(w[0], client.CompareAndSet(w[0], w[1], w[2]))
}

// invoke does i and prints the new value of key.
func (s *statements) invoke(key []byte, i client.Invocation) (err error) {
	var out client.Outcome
	var epoch client.Epoch
	switch {
	case s.tx != nil:
		s.wrote = true
		out, err = s.tx.Invoke(i.ReturnNew())
	case s.at != (past{}):
		return errReadingPast
	default:
		s.app.writing = true
		out, epoch, err = s.client.Invoke(s.ctx, i.ReturnNew())
	}
	if err != nil {
		return err
	}
	s.app.writing = false
	if !out.Applied {
		return errNotApplied
	}
	return s.app.printFound(key, client.Value{Found: out.NewFound, Data: out.New, Epoch: epoch})
}

func (s *statements) begin(words []string) error {
	if s.tx != nil {
		return errInTransaction
	}
	var options []client.TxnOption
	for i := 0; i < len(words); i++ {
		switch {
		case words[i] == "snapshot":
			options = append(options, client.SnapshotIsolation())
		case words[i] == "serializable": // as it is anyway
		case words[i] == "readonly":
			options = append(options, client.ReadOnly())
		case words[i] == "at" && i+1 < len(words):
			var at past
			if err := at.Set(words[i+1]); err != nil {
				return usageError{err}
			}
			options = append(options, at.begin())
			i++
		default:
			return usageError{fmt.Errorf("usage: %s", verbs["begin"].usage)}
		}
	}
	return s.open(options)
}

// open begins a transaction.
func (s *statements) open(options []client.TxnOption) (err error) {
	s.savepoints, s.wrote, s.app.writing = map[string]uint64{}, false, false
	ctx, end := context.WithCancel(s.ctx)
	s.endTx = end
	err = s.within(func() (err error) {
		s.tx, err = s.client.Begin(ctx, options...)
		return err
	})
	if err != nil {
		end()
	}
	return err
}

func (s *statements) savepoint(words []string) error {
	if s.tx == nil {
		return errNoTransaction
	}
	n, err := s.tx.Savepoint()
	if err != nil {
		return err
	}
	s.savepoints[words[0]] = n
	return nil
}

func (s *statements) rollback(words []string) error {
	if s.tx == nil {
		return errNoTransaction
	}
	if len(words) == 0 {
		s.abandon()
		return nil
	}
	if words[0] != "to" || len(words) != 2 {
		return usageError{fmt.Errorf("usage: %s", verbs["rollback"].usage)}
	}
	n, ok := s.savepoints[words[1]]
	if !ok {
		return usageError{fmt.Errorf("unknown savepoint %q; create it with: savepoint NAME", words[1])}
	}
	return s.tx.RollbackTo(n)
}

// abandon rolls back what is open, if anything.
func (s *statements) abandon() {
	if s.tx != nil {
		s.tx.Rollback()
		s.endTx()
		s.tx = nil
	}
}

func (s *statements) commit([]string) error {
	if s.tx == nil {
		return errNoTransaction
	}
	s.app.writing = s.wrote
	epoch, err := s.tx.Commit()
	s.endTx()
	s.tx = nil
	if err != nil {
		return err
	}
	s.app.writing = false
	return s.app.done(epoch)
}

func (s *statements) setAt(words []string) error {
	if s.tx != nil {
		return errInTransaction
	}
	if words[0] == "now" {
		s.at = past{}
		return nil
	}
	var at past
	if err := at.Set(words[0]); err != nil || at.epoch == 0 && at.time.IsZero() {
		return usageError{fmt.Errorf("%q: expected an epoch or a time (%s), or now", words[0], momentForms)}
	}
	s.at = at
	return nil
}

func (s *statements) status([]string) error {
	status, err := s.client.Status(s.ctx)
	if err != nil {
		return err
	}
	return s.app.printStatus(status)
}

func (s *statements) conditions([]string) error {
	status, err := s.client.Status(s.ctx)
	if err != nil {
		return err
	}
	h := status.GetHealth()
	if len(h.GetConditions()) == 0 && s.app.formatOr(formatTable) == formatTable {
		return s.app.print("%s; no condition is active\n", healthText(h))
	}
	return s.app.printHealth(h.GetState() == kvpb.Health_STATE_SERVING, h.GetConditions())
}

func (s *statements) help([]string) error {
	for _, name := range s.names() {
		if err := s.app.print("  %-43s %s\n", verbs[name].usage, verbs[name].about); err != nil {
			return err
		}
	}
	return s.app.print("  %-43s %s\n", "exit", "leave; an open transaction is rolled back")
}

// printFound prints one value that was read, or that it was not there.
func (a *app) printFound(key []byte, v client.Value) error {
	format := a.formatOr(formatJSONL)
	switch {
	case format == formatTable && !v.Found:
		return a.print("(not found)\n")
	case format == formatTable:
		return a.print("%s\n", a.cell(v.Data))
	case format == formatRaw && !v.Found:
		return a.print("\n")
	case format == formatRaw:
		return a.print("%s\n", a.rawBytes(v.Data))
	}
	r := record{key: key, value: v.Data, epoch: v.Epoch, expiresAt: milliseconds(v.ExpiresAt), keyOnly: !v.Found}
	line := r.appendJSON(nil, a.hex)
	if !v.Found {
		line = append(line[:len(line)-1], `,"found":false}`...)
	}
	return a.print("%s\n", line)
}

// done prints that a statement has been executed: at an epoch, if it has one. Only people are told of those that have none.
func (a *app) done(epoch client.Epoch) error {
	if epoch != 0 {
		return a.written(epoch)
	}
	if a.formatOr(formatJSONL) == formatTable {
		return a.print("ok\n")
	}
	return nil
}
