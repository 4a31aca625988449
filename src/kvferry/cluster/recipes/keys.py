"""Names of the files beside a recipe that hold keys."""

SECRET_ENV = "secret.env"
ADMIN_KEY = "admin-key"
