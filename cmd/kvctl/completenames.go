package main

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// lister returns the names or ids that an argument may have.
type lister func(ctx context.Context, c *client.Client) []string

// nameArguments are the verbs whose first argument is a name or an id that the server knows.
var nameArguments = map[string]lister{
	"kvctl user update": listUsers, "kvctl user delete": listUsers, "kvctl user show": listUsers, "kvctl user password": listUsers,
	"kvctl role update": listRoles, "kvctl role delete": listRoles,
	"kvctl token revoke":     listTokens,
	"kvctl holds renew":      listHolds,
	"kvctl holds end":        listHolds,
	"kvctl lease show":       listLeases,
	"kvctl lease revoke":     listLeases,
	"kvctl lease keep-alive": listLeases,
	"kvctl feed end":         listWatches,
	"kvctl snapshots end":    listSnapshots,
	"kvctl txn end":          listTransactions,
}

func listUsers(ctx context.Context, c *client.Client) []string {
	users, _ := c.Users(ctx) // nothing is offered after an error
	return namesOf(users, (*kvpb.User).GetName)
}

func listRoles(ctx context.Context, c *client.Client) []string {
	roles, _ := c.Roles(ctx)
	return namesOf(roles, (*kvpb.Role).GetName)
}

func listTokens(ctx context.Context, c *client.Client) []string {
	tokens, _ := c.Tokens(ctx, &kvpb.ListTokensRequest{})
	return namesOf(tokens, (*kvpb.Token).GetId)
}

func listHolds(ctx context.Context, c *client.Client) []string {
	holds, _ := c.Holds(ctx)
	return namesOf(holds, func(h client.Hold) string { return decimal(h.ID) })
}

func listLeases(ctx context.Context, c *client.Client) []string {
	leases, _ := c.Leases(ctx)
	return namesOf(leases, func(l *kvpb.Lease) string { return decimal(l.GetId()) })
}

func listSnapshots(ctx context.Context, c *client.Client) []string {
	snapshots, _ := c.Snapshots(ctx)
	return namesOf(snapshots, func(s *kvpb.SnapshotInfo) string { return decimal(s.GetId()) })
}

func listTransactions(ctx context.Context, c *client.Client) []string {
	transactions, _ := c.Transactions(ctx)
	return namesOf(transactions, func(t *kvpb.TransactionInfo) string { return decimal(t.GetId()) })
}

func listWatches(ctx context.Context, c *client.Client) []string {
	watches, _ := c.Watches(ctx)
	return namesOf(watches, func(w *kvpb.WatchInfo) string { return decimal(w.GetId()) })
}

func decimal(id uint64) string { return strconv.FormatUint(id, 10) }

func namesOf[T any](all []T, name func(T) string) (names []string) {
	for _, e := range all {
		names = append(names, name(e))
	}
	return names
}

// completeNames offers what list returns for the first argument.
func (a *app) completeNames(list lister) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, word string) (names []string, _ cobra.ShellCompDirective) {
		if len(args) == 0 {
			a.askServer(cmd, func(ctx context.Context, c *client.Client) {
				for _, name := range list(ctx, c) {
					if strings.HasPrefix(name, word) && isShellWord(name) && len(names) < completionsMax {
						names = append(names, name)
					}
				}
			})
		}
		slices.Sort(names)
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}
