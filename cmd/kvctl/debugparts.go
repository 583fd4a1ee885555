package main

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// leftOut takes the place of a text that may name keys.
const leftOut = "(left out, because it may name keys; kvctl debug bundle --with-keys keeps it)"

// keylessCauses are the conditions whose causes never name keys: they have amounts, times, names of files, or errors of the
// operating system. Those of all other conditions may, today or in a later version.
var keylessCauses = []string{
	"memory-full", "writes-stalled", "disk-low", "disk-full", "log-segment", "clock-differs", "old-snapshot",
	"archive-refused", "archive-in-use", "archive-failing", "archive-lagging", "archive-without-base",
	"tls-certificate-expires", "tls-client-ca-expires", "tls-reload-failed", "tls-revocation-list-old",
}

// serverParts are the parts that come from the server's RPCs, the status first.
func (a *app) serverParts(c *client.Client, withKeys bool) []*bundlePart {
	status := func(ctx context.Context) (*kvpb.StatusResponse, error) {
		s, err := c.Status(ctx)
		if err == nil && !withKeys {
			redactHealth(s.GetHealth())
		}
		return s, err
	}
	part := func(name, about string, collect func(ctx context.Context) ([]byte, error)) *bundlePart {
		return &bundlePart{name: name, about: about, collect: collect}
	}
	return []*bundlePart{
		part("status.json", "kvctl status: epochs, sizes, sessions, limits, activity, recovery", func(ctx context.Context) ([]byte, error) {
			s, err := status(ctx)
			return objectJSON(s, err)
		}),
		part("conditions.json", "kvctl health: the active conditions", func(ctx context.Context) ([]byte, error) {
			s, err := status(ctx)
			return listJSON(s.GetHealth().GetConditions(), err)
		}),
		part("log-holders.json", "kvctl log holders: what keeps the log", func(ctx context.Context) ([]byte, error) {
			s, err := status(ctx)
			return listJSON(s.GetLogHolders(), err)
		}),
		part("config.json", "kvctl config get: the options, with their values and where these come from", func(ctx context.Context) ([]byte, error) {
			return listJSON(c.Config(ctx))
		}),
		part("slow.json", "kvctl slow: the slowest requests of the last hour", func(ctx context.Context) ([]byte, error) {
			s, err := c.SlowRequests(ctx, 0, false)
			for _, r := range s.GetRequests() {
				if !withKeys {
					r.KeyPrefix = nil
				}
			}
			return objectJSON(s, err)
		}),
		part("transactions.json", "kvctl txn list: open interactive transactions", func(ctx context.Context) ([]byte, error) {
			return listJSON(c.Transactions(ctx))
		}),
		part("snapshots.json", "kvctl snapshots list: what keeps old versions", func(ctx context.Context) ([]byte, error) {
			return listJSON(c.Snapshots(ctx))
		}),
		part("watches.json", "kvctl feed list: the watches of all clients", func(ctx context.Context) ([]byte, error) {
			all, err := c.Watches(ctx)
			for _, w := range all {
				if !withKeys {
					w.Ranges = nil
				}
			}
			return listJSON(all, err)
		}),
		part("holds.json", "kvctl holds list: what keeps the past", func(ctx context.Context) ([]byte, error) {
			return holdsJSON(c.Holds(ctx))
		}),
		part("backup.json", "kvctl backup status: the running backup and the last one", func(ctx context.Context) ([]byte, error) {
			s, err := c.BackupStatus(ctx)
			if s.GetLast().GetError() != "" && !withKeys {
				s.Last.Error = leftOut
			}
			return objectJSON(s, err)
		}),
		part("archive.json", "kvctl archive status: the log archive", func(ctx context.Context) ([]byte, error) {
			s, err := c.ArchiveStatus(ctx)
			return objectJSON(s, err)
		}),
	}
}

// redactHealth leaves out the texts that may name keys.
func redactHealth(h *kvpb.Health) {
	if h.GetCause() != "" {
		h.Cause = leftOut // the causes of the conditions in one line
	}
	for _, c := range h.GetConditions() {
		if c.GetCause() != "" && !slices.Contains(keylessCauses, c.GetName()) {
			c.Cause = leftOut
		}
	}
}

func holdsJSON(all []client.Hold, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	rows := make([]holdRow, len(all))
	for i, h := range all {
		rows[i] = holdRow{ID: h.ID, Epoch: uint64(h.Epoch), Deadline: h.Deadline.UTC().Format(time.RFC3339), Owner: h.Owner}
	}
	return json.MarshalIndent(rows, "", "  ")
}

// objectJSON is a message as indented JSON.
func objectJSON(m proto.Message, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	text, err := appendMessageJSON(nil, m.ProtoReflect(), false)
	return indented(text, err)
}

// listJSON is an indented array of messages.
func listJSON[Message proto.Message](all []Message, err error) ([]byte, error) {
	text := []byte{'['}
	for i, m := range all {
		if i > 0 {
			text = append(text, ',')
		}
		if err == nil {
			text, err = appendMessageJSON(text, m.ProtoReflect(), false)
		}
	}
	return indented(append(text, ']'), err)
}

func indented(text []byte, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = json.Indent(&out, text, "", "  ")
	return out.Bytes(), err
}
