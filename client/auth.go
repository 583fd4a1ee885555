package client

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Login exchanges a password for a token, which is valid for a lifetime; zero is 12 hours. The label is what lists of tokens show.
func (c *Client) Login(ctx context.Context, user, password, label string, lifetime time.Duration) (token string, expires time.Time, err error) {
	if c.exposed {
		return "", time.Time{}, errPlainSecret
	}
	request := &kvpb.LoginRequest{User: user, Password: password, Label: label}
	if lifetime != 0 {
		request.Lifetime = durationpb.New(lifetime)
	}
	response, err := call(ctx, c, !safe, c.auth.Login, request)
	if err != nil {
		return "", time.Time{}, err
	}
	return response.GetToken(), response.GetExpires().AsTime(), nil
}

// Logout revokes the token of the client.
func (c *Client) Logout(ctx context.Context) error {
	_, err := call(ctx, c, !safe, c.auth.Logout, &kvpb.LogoutRequest{})
	return err
}

// Bootstrap makes the first user with all rights, with the token that the server prints at its start.
func (c *Client) Bootstrap(ctx context.Context, token, user, password string) error {
	if c.exposed {
		return errPlainSecret
	}
	_, err := call(ctx, c, !safe, c.auth.Bootstrap, &kvpb.BootstrapRequest{Token: token, User: user, Password: password})
	return err
}

// WhoAmI returns how the server knows the client, and what it may do.
func (c *Client) WhoAmI(ctx context.Context) (*kvpb.WhoAmIResponse, error) {
	return call(ctx, c, safe, c.auth.WhoAmI, &kvpb.WhoAmIRequest{})
}

// EnableUsers makes the server check users.
func (c *Client) EnableUsers(ctx context.Context) error {
	_, err := call(ctx, c, safe, c.auth.Enable, &kvpb.EnableRequest{})
	return err
}

// DisableUsers ends that the server checks users: every client that can connect may then do everything.
func (c *Client) DisableUsers(ctx context.Context) error {
	_, err := call(ctx, c, !safe, c.auth.Disable, &kvpb.DisableRequest{})
	return err
}

// Explain tells whether a user may do something.
func (c *Client) Explain(ctx context.Context, request *kvpb.ExplainRequest) (*kvpb.ExplainResponse, error) {
	return call(ctx, c, safe, c.auth.Explain, request)
}

// CreateUser makes a user.
func (c *Client) CreateUser(ctx context.Context, request *kvpb.CreateUserRequest) error {
	if c.exposed && request.GetPassword() != "" {
		return errPlainSecret
	}
	_, err := call(ctx, c, !safe, c.auth.CreateUser, request)
	return err
}

// UpdateUser changes a user.
func (c *Client) UpdateUser(ctx context.Context, request *kvpb.UpdateUserRequest) error {
	_, err := call(ctx, c, safe, c.auth.UpdateUser, request)
	return err
}

// DeleteUser removes a user and its tokens.
func (c *Client) DeleteUser(ctx context.Context, name string) error {
	_, err := call(ctx, c, !safe, c.auth.DeleteUser, &kvpb.DeleteUserRequest{Name: name})
	return err
}

// Users lists the users by name.
func (c *Client) Users(ctx context.Context) ([]*kvpb.User, error) {
	response, err := call(ctx, c, safe, c.auth.ListUsers, &kvpb.ListUsersRequest{})
	return response.GetUsers(), err
}

// SetPassword changes a password.
func (c *Client) SetPassword(ctx context.Context, request *kvpb.SetPasswordRequest) error {
	if c.exposed {
		return errPlainSecret
	}
	_, err := call(ctx, c, !safe, c.auth.SetPassword, request)
	return err
}

// CreateRole makes a role.
func (c *Client) CreateRole(ctx context.Context, role *kvpb.Role) error {
	_, err := call(ctx, c, !safe, c.auth.CreateRole, &kvpb.CreateRoleRequest{Role: role})
	return err
}

// UpdateRole replaces the rights of a role.
func (c *Client) UpdateRole(ctx context.Context, role *kvpb.Role) error {
	_, err := call(ctx, c, safe, c.auth.UpdateRole, &kvpb.UpdateRoleRequest{Role: role})
	return err
}

// DeleteRole removes a role, also from the users that have it.
func (c *Client) DeleteRole(ctx context.Context, name string) error {
	_, err := call(ctx, c, !safe, c.auth.DeleteRole, &kvpb.DeleteRoleRequest{Name: name})
	return err
}

// Roles lists the roles by name.
func (c *Client) Roles(ctx context.Context) ([]*kvpb.Role, error) {
	response, err := call(ctx, c, safe, c.auth.ListRoles, &kvpb.ListRolesRequest{})
	return response.GetRoles(), err
}

// CreateToken makes a token, which is shown once. A request whose answer is lost may have made one that nothing knows: it is in
// the list.
func (c *Client) CreateToken(ctx context.Context, request *kvpb.CreateTokenRequest) (*kvpb.CreateTokenResponse, error) {
	if c.exposed {
		return nil, errPlainSecret
	}
	return call(ctx, c, !safe, c.auth.CreateToken, request)
}

// Tokens lists tokens without their secrets.
func (c *Client) Tokens(ctx context.Context, request *kvpb.ListTokensRequest) ([]*kvpb.Token, error) {
	response, err := call(ctx, c, safe, c.auth.ListTokens, request)
	return response.GetTokens(), err
}

// RevokeToken removes a token.
func (c *Client) RevokeToken(ctx context.Context, id string) error {
	_, err := call(ctx, c, !safe, c.auth.RevokeToken, &kvpb.RevokeTokenRequest{Id: id})
	return err
}
